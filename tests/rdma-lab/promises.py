"""What the lab promises to those who use it: time limit, user, environment, files, and that it looks at
the kernel's log. Two machines side by side. That the command's exit status is the lab's, boot.py sees.

    promises.py
"""

import concurrent.futures
import pathlib
import sys
import tempfile

from boot import Untrue, check, lab


def kernel_warning():
    """A kernel warning fails a run whose command succeeds. What is in /out comes back."""
    with tempfile.TemporaryDirectory() as folder:
        status, out, errors = lab("single", "--out", folder, "sh", "-c", """
            echo 'WARNING: a test' >/dev/kmsg
            head -c 100000 /dev/zero >/out/zeros
            echo fine""")
        check(status == 123 and "fine" in out, f"the run fails ({status}) for the kernel's sake, 123")
        check("WARNING: a test" in errors, "the kernel's line is printed")
        check(pathlib.Path(folder, "zeros").read_bytes() == bytes(100000), "the file comes back whole")


def command_hangs():
    """A command that hangs is stopped, after its own time; it has the user, limit and environment that
    were asked for."""
    status, out, errors = lab(
        "single", "--timeout", 3, "--user", 1000, "--memlock", 16 << 20, "--env", "WORDS=a 'b' $c", "--",
        "sh", "-c", 'echo "user $(id -u), memlock $(ulimit -l), words $WORDS"; sleep 1000')
    check("user 1000, memlock 16384, words a 'b' $c\n" in out, "user, limit and environment are as asked")
    check(status == 124 and "time limit" in errors, f"the machine is stopped ({status}), 124")


def verdict(function):
    try:
        function()
    except Untrue as untrue:
        return f"FAILED: {untrue}"
    return "passed"


promises = [kernel_warning, command_hangs]
with concurrent.futures.ThreadPoolExecutor() as pool:
    verdicts = list(pool.map(verdict, promises))
for function, text in zip(promises, verdicts):
    print(f"promises: {function.__name__}: {text}")
sys.exit(any(text != "passed" for text in verdicts))
