#!/bin/sh
# Says in plain words what a build needs and this machine lacks. Usage: check-machine.sh PYTHON
python=$1
fail() {
    echo "octavo: $1" >&2
    echo "        On Debian or Ubuntu: apt-get install $2" >&2
    exit 1
}

command -v "$python" >/dev/null 2>&1 || fail "no $python found; Python 3.10 or later is needed." python3
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$("$python" --version) is too old; 3.10 or later is needed (make PYTHON=python3.12 ...)." python3
"$python" -c 'import ensurepip, venv' 2>/dev/null || fail "$python has no venv module with pip." python3-venv
"$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' ||
    fail "the C headers of $python (Python.h) are missing." python3-dev
command -v "${CXX:-c++}" >/dev/null 2>&1 || command -v g++ >/dev/null 2>&1 || command -v clang++ >/dev/null 2>&1 ||
    fail "no C++ compiler found; one for C++17 is needed." g++
