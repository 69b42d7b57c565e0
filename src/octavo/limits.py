"""Every bound on what a request or a file can make grow, in one place."""

from __future__ import annotations

# Sampling parameters
MAX_N = 16
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_TEMPERATURE = 2.0
MAX_CACHE_SALT_CHARS = 256
DEFAULT_MAX_TOKENS = 256

# Model files
MAX_GGUF_METADATA_ENTRIES = 65_536
MAX_GGUF_TENSORS = 65_536
MAX_GGUF_STRING_BYTES = 16 << 20
MAX_GGUF_ARRAY_ELEMENTS = 1 << 22
MAX_GGUF_HEADER_BYTES = 256 << 20
MAX_GGUF_ALIGNMENT = 1 << 16
MAX_TENSOR_NAME_BYTES = 1024
MAX_SAFETENSORS_HEADER_BYTES = 16 << 20
MAX_SAFETENSORS_FILES = 1024
MAX_CONFIG_BYTES = 16 << 20
MAX_JSON_BYTES = 64 << 20
MAX_LAYERS = 1024
MAX_HIDDEN = 1 << 17
MAX_INTERMEDIATE = 1 << 20
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_CONTEXT = 1 << 24
MAX_VOCABULARY = 1 << 20

# Chat templates
MAX_TEMPLATE_CHARS = 1 << 16
MAX_TEMPLATE_OUTPUT_CHARS = 4 << 20
MAX_TEMPLATE_STEPS = 1_000_000

# KV memory and scheduling
BLOCK_TOKENS = 16
MAX_BATCH_SEQUENCES = 256
MAX_STEP_ROWS = 2048
MAX_WAITING_REQUESTS = 65_536

# Benchmarks
MAX_BENCH_PROMPTS = 65_536
MAX_DATASET_BYTES = 1 << 30

# Server
MAX_FRAME_BYTES = 64 << 20  # between the API process and the engine process
MAX_STREAM_TOKENS = 1024  # delivered by the engine and not yet read by the client
MAX_BODY_BYTES = 4 << 20  # of a request, unless the operator sets another bound
MAX_BODY_BYTES_SETTING = 64 << 20
MAX_DISCARDED_BYTES = 64 << 20  # of a body that was refused, read so that the client gets to the refusal
MAX_ARRIVING_BYTES = 256 << 20  # of all bodies that are not complete; short ones may still come beyond it
MAX_HEADERS = 100
MAX_HEADER_BYTES = 16 << 10  # names and values of all headers of a request
MAX_URL_BYTES = 4096
MAX_OPS_CONNECTIONS = 64  # to the ops listener at once
RESERVED_DESCRIPTORS = 128  # for all that is no connection of a client: the ops listener, the engine, files
MAX_PIPELINED_REQUESTS = 16  # sent on one connection before the first is answered
MAX_PIPELINED_BYTES = 256 << 10  # likewise
MAX_WRITE_BUFFER_BYTES = 64 << 10  # of one connection; beyond, its stream waits
MAX_QUEUED_REQUESTS = 65_536
MAX_RETRY_AFTER_SECONDS = 120
MAX_TIMEOUT_SECONDS = 86_400
MAX_API_KEYS = 10_000
MAX_API_KEY_CHARS = 512
MAX_REQUEST_ID_CHARS = 128
MAX_SERVER_CONFIG_BYTES = 1 << 20
SHORT_BODY_BYTES = 64 << 10  # longer ones are read on a thread of their own
MAX_JSON_DEPTH = 64
MAX_JSON_MEMBERS = 65_536  # lists, objects and fields of a body
MAX_JSON_VALUES = (1 << 20) + 1024  # items of its lists and objects
MAX_PROMPTS = 64  # in one completion request
MAX_REQUEST_SEQUENCES = 256  # prompts x n
MAX_MESSAGES = 4096
MAX_IGNORED_FIELDS_NAMED = 32
MAX_QUEUED_SPANS = 2048  # traces that no collector has taken yet; beyond, the oldest are dropped
MAX_DETOKENIZE_TOKENS = 1 << 20
COMPLETION_MAX_TOKENS = 16  # of /v1/completions, when not given
TGI_MAX_BEST_OF = 2
TGI_MAX_STOP_SEQUENCES = 4
TGI_MAX_TOP_N_TOKENS = 5
