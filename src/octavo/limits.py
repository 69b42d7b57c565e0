"""Every bound on what a request or a file can make grow, in one place."""

from __future__ import annotations

# Sampling parameters
MAX_N = 16
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_SHOWN_SPECIAL_IDS = 64
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

# Structured outputs
MAX_SCHEMA_CHARS = 256 << 10
MAX_REGEX_CHARS = 16 << 10
MAX_GRAMMAR_CHARS = 64 << 10
MAX_CHOICES = 1024
MAX_CHOICE_CHARS = 4096
MAX_START_AFTER_CHARS = 256

# The language
PROGRAM_MAX_TOKENS = 128  # of a gen, when neither it nor `run` says
MAX_SELECT_CHOICES = 1024
MAX_BATCH_THREADS = 128  # programs of one run_batch that run at the same time, unless it says
MAX_FORK_THREADS = 64  # forks of one run or batch that run at the same time
MIN_CACHED_PREFIX_CHARS = 64  # a shorter prefix of a batch is not computed ahead
MAX_FORKS = 1024  # children of one fork
MAX_BACKEND_ANSWER_BYTES = 64 << 20  # of a server a program calls
BACKEND_TRIES = 4  # of a request that is answered "overloaded"
MAX_BACKEND_PAUSE_SECONDS = 30  # between two of them
BACKEND_ENCODERS = 8  # texts of one select that a server is asked to tokenise at the same time

# Tools
MAX_TOOLS = 128
MAX_TOOL_NAME_CHARS = 64
MAX_TOOL_SCHEMA_CHARS = 1 << 16  # the parameters of one function, as JSON
MAX_TOOL_CALLS = 128  # in one message of a conversation, or one answer that a grammar writes
MAX_TOOL_CALL_HEAD_CHARS = 1 << 16  # of what looks like a call, before it is known to be one

# Grammars, compiled and run by llguidance; its own units are in parentheses
MAX_SCHEMA_DEPTH = 60
MAX_SCHEMA_PROPERTIES = 1000  # named, in all of a schema; compiling takes time that grows with their square
MAX_SCHEMA_EXPANSION = 1 << 16  # characters that one value may be forced to have
MAX_SCHEMA_MULTIPLE_OF = 10_000  # without its decimal point
MAX_GRAMMAR_EXPANSION = 1 << 14  # characters of a pattern with its repetitions written out
MAX_GRAMMAR_DEPTH = 100  # parentheses in one another
MAX_GRAMMAR_RULES = 2048
MAX_INTERSECTIONS = 8  # patterns that one text must match at once; the cost doubles with each
MAX_GRAMMAR_SYMBOLS = 100_000  # (of all productions)
MAX_GRAMMAR_BUILD_FUEL = 1_000_000  # (lexer fuel, about 50,000 a millisecond)
MAX_GRAMMAR_STEP_FUEL = 200_000  # (of one token's mask, about 14,000 a millisecond)
MAX_GRAMMAR_STEP_ITEMS = 50_000  # (parser items of one token's mask, about 20,000 a millisecond)
MAX_GRAMMAR_ROW_ITEMS = 2000  # (parser items at one position)
MAX_GRAMMAR_LEXER_STATES = 50_000  # of one grammar
MAX_CACHED_GRAMMARS = 16  # each keeps the states that its outputs made
MAX_CACHED_GRAMMAR_TOKENS = 16_384  # of outputs, before a grammar is compiled afresh, without the states of others
MAX_CACHED_MARKERS = 16
MAX_CACHED_GRAMMAR_CHARS = 4 << 20  # of their texts
GRAMMAR_THREADS = 2  # that compile for a served engine
MAX_JSON_SPACES = 32  # between two signs of a JSON output
