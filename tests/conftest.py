"""Settings of the whole test run."""

from __future__ import annotations

import signal

# A run in the background of a script inherits an ignored SIGINT, and so do the processes that tests start. The tests
# of Ctrl-C need the usual one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
