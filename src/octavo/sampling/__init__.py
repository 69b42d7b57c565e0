"""From validated parameters to the rows the executor samples, and when an output stops."""

from __future__ import annotations

from octavo.sampling.resolve import ResolvedParams as ResolvedParams
from octavo.sampling.resolve import resolve as resolve
from octavo.sampling.rows import RowEdits as RowEdits
from octavo.sampling.rows import build_rows as build_rows
from octavo.sampling.state import SamplerState as SamplerState
from octavo.sampling.stop import StopChecker as StopChecker
