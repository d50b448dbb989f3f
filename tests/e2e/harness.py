"""What the end-to-end tests share: a build to test, daemons, network namespaces, programs.

A test file is a script of functions marked @case; `main()` at its end runs the one that is named on
the command line. ctest gives PENSTOCK_BUILD (the build folder) and PENSTOCK_CUDA_STUB.

Nothing may outlive a test, not even one that is killed: every process started here dies with the
harness (PR_SET_PDEATHSIG), and the namespaces have no names, so they vanish with the processes in
them. Where the tests do not run as root, the harness becomes root in a user namespace of its own.
"""

import ctypes
import json
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

BUILD = os.environ.get("PENSTOCK_BUILD") or os.path.abspath(
    os.path.join(os.path.dirname(__file__), "..", "..", "build"))
CUDA_STUB = os.environ.get("PENSTOCK_CUDA_STUB", "")
LIBRARIES = f"{BUILD}/lib/penstock"
INTERPOSER = f"{LIBRARIES}/libcuda.so.1"
SIMGPU = f"{LIBRARIES}/simgpu"
PENSTOCK = f"{BUILD}/bin/penstock"
PENSTOCKD = f"{BUILD}/bin/penstockd"

SAMPLES = ["vector_add", "matrix_multiply", "reduction_shuffle", "histogram_atomics", "two_streams",
           "constant_symbols", "driver_api_ptx", "host_threads", "kernel_printf"]
VARIANTS = ["static", "shared", "rdc", "per_thread", "ptx_only"]

START_LIMIT_S = 20  # for a daemon, on a loaded machine
PROGRAM_LIMIT_S = 60

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


class Failure(Exception):
    """The test's verdict, as one sentence."""


def check(condition, sentence):
    if not condition:
        raise Failure(sentence)


def check_equal(got, expected, what):
    check(got == expected, f"{what} is ({got!r}) instead of ({expected!r}).")


# ---- processes ----------------------------------------------------------------------------------


def _die_with_parent():
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def start(command, env=None, namespace=None, **options):
    """Popen with the lifetime rule above; inside a namespace if one is given."""
    options.setdefault("stdin", subprocess.DEVNULL)
    if namespace is not None:
        command = namespace.enter + command
    return subprocess.Popen(command, env=env, preexec_fn=_die_with_parent, **options)


class Outcome:
    def __init__(self, status, out, err, seconds):
        self.status, self.out, self.err, self.seconds = status, out, err, seconds


def run(command, env=None, namespace=None, limit_s=PROGRAM_LIMIT_S, **options):
    """Runs a program to its end. Never raises for its exit status; a time-out is a failure."""
    began = time.monotonic()
    process = start(command, env, namespace, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    text=True, errors="replace", **options)
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise Failure(f"{command} does not end within {limit_s} s. It said:\n{out}{err}") from None
    return Outcome(process.returncode, out, err, time.monotonic() - began)


def check_ok(outcome, what):
    check(outcome.status == 0,
          f"{what} ends with status ({outcome.status}). It said:\n{outcome.out}{outcome.err}")
    return outcome


def wait_until(condition, limit_s, sentence):
    """Polls until condition() is true and returns how long that took."""
    began = time.monotonic()
    while not condition():
        check(time.monotonic() - began < limit_s, sentence)
        time.sleep(0.01)
    return time.monotonic() - began


def descendants(pid):
    """All living processes below pid."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                parents[int(entry)] = int(fields[1])
    found, fresh = [], [pid]
    while fresh:
        fresh = [child for child, parent in parents.items() if parent in fresh]
        found += fresh
    return found


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---- environments -------------------------------------------------------------------------------


def _clean_environment():
    return {name: value for name, value in os.environ.items()
            if not name.startswith(("PENSTOCK_", "SIMGPU_", "CUDA_", "LD_"))}


def direct_env(**more):
    """For a program that runs on simgpu itself, with nothing of Penstock."""
    return {**_clean_environment(), "LD_LIBRARY_PATH": SIMGPU, **more}


def client_env(daemon, **more):
    """For a program whose GPU is the daemon's: nothing but the preload and three variables. On one
    machine the default were shared memory, so tcp is named; shared_memory.py names the other."""
    env = {**_clean_environment(), "LD_PRELOAD": INTERPOSER, "PENSTOCK_SERVER": daemon.address,
           "PENSTOCK_TRANSPORT": "tcp"}
    if daemon.key_file:
        env["PENSTOCK_KEY_FILE"] = daemon.key_file
    return {**env, **more}


def plain_env(**more):
    """For `penstock` itself."""
    return {**_clean_environment(), **more}


def sample(variant, name):
    return f"{BUILD}/bin/samples/{variant}/{name}"


def program(name):
    """One of tests/e2e/programs."""
    return f"{BUILD}/bin/e2e/{name}"


# ---- daemon and network -------------------------------------------------------------------------


class Scratch:
    """A temporary folder for one test."""

    def __enter__(self):
        self.path = tempfile.mkdtemp(prefix="penstock-e2e-")
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.path, ignore_errors=True)

    def __truediv__(self, name):
        return os.path.join(self.path, name)


class Daemon:
    """A penstockd on the simulated GPU. Its log is shown when the test fails."""

    def __init__(self, host="127.0.0.1", namespace=None, arguments=(), **env):
        self._host, self._namespace, self._arguments, self._env = host, namespace, arguments, env
        self.key_file = None

    def __enter__(self):
        self._scratch = Scratch().__enter__()
        port_file, self._log = self._scratch / "port", self._scratch / "log"
        command = [PENSTOCKD, "--listen", f"{self._host}:0", "--driver", "sim", "--port-file",
                   port_file, *self._arguments]
        if self._host != "127.0.0.1":  # only the loopback address may go without a key
            self.key_file = self._scratch / "key"
            with open(self.key_file, "w", encoding="ascii",
                      opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(secrets.token_hex(32) + "\n")
            command += ["--key-file", self.key_file]
        with open(self._log, "w", encoding="utf-8") as log:
            self.process = start(command, plain_env(**self._env), self._namespace, stdout=log,
                                 stderr=log)
        try:
            wait_until(lambda: self._port(port_file) or self.process.poll() is not None,
                       START_LIMIT_S, "The daemon writes no port.")
            port = self._port(port_file)
            check(port, f"The daemon ends with status ({self.process.poll()}).")
        except Failure as failure:
            log = self.log()
            self.__exit__()
            raise Failure(f"{failure} Its log:\n{log}") from None
        self.address = f"{self._host}:{port}"
        return self

    @staticmethod
    def _port(path):
        try:
            with open(path, encoding="ascii") as file:
                return int(file.read() or 0)
        except (OSError, ValueError):
            return 0

    @property
    def pid(self):
        return self.process.pid  # nsenter becomes the daemon, so this is the daemon's own

    def log(self):
        with open(self._log, encoding="utf-8", errors="replace") as file:
            return file.read()

    def kill_all(self):
        """kill -9 of the daemon and every process of its, as when the machine is cut off."""
        for pid in [self.pid, *descendants(self.pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def __exit__(self, kind=None, *_):
        below = descendants(self.pid)
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if kind is not None:
            print("---- the daemon's log, last lines")
            print("\n".join(self.log().splitlines()[-40:]))
        self._scratch.__exit__()


class _Namespace:
    """A network namespace, held open by a sleeping process."""

    def __init__(self):
        self._holder = start(["unshare", "--net", "sleep", "100000"])
        self.path = f"/proc/{self._holder.pid}/ns/net"
        own = os.readlink("/proc/self/ns/net")
        wait_until(lambda: os.readlink(self.path) != own, 10, "unshare makes no namespace.")
        self.pid = self._holder.pid
        self.enter = ["nsenter", f"--net={self.path}", "--"]

    def ip(self, *arguments):
        subprocess.run([*self.enter, "ip", *arguments], check=True)

    def close(self):
        self._holder.kill()
        self._holder.wait()


class TwoHosts:
    """Two network namespaces joined by a veth pair: .server at .server_host, .client at the other
    end. There is no other way between them, loopback included."""

    server_host, client_host = "10.77.0.1", "10.77.0.2"

    def __enter__(self):
        self.server, self.client = _Namespace(), _Namespace()
        self.server.ip("link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns",
                       str(self.client.pid))
        for side, host in ((self.server, self.server_host), (self.client, self.client_host)):
            side.ip("link", "set", "lo", "up")
            side.ip("address", "add", f"{host}/24", "dev", "link0")
            side.ip("link", "set", "link0", "up")
        return self

    def __exit__(self, *_):
        self.client.close()
        self.server.close()


def become_root():
    """Network namespaces need root: where we are not, a user namespace makes us so."""
    if os.geteuid() != 0:
        os.execvp("unshare", ["unshare", "--user", "--map-root-user", sys.executable, *sys.argv])


# ---- programs that are talked to ----------------------------------------------------------------


class Conversation:
    """A program of tests/e2e/programs that answers each line of its stdin with one line of stdout."""

    def __init__(self, command, env, namespace=None):
        self._process = start(command, env, namespace, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True, bufsize=1)
        self._heard = b""  # select knows nothing of what a file object has read ahead

    def __enter__(self):
        return self

    def hear(self, limit_s=PROGRAM_LIMIT_S):
        """The next line. The program's end is an empty line."""
        while b"\n" not in self._heard:
            ready, _, _ = select.select([self._process.stdout], [], [], limit_s)
            check(ready, f"The program says nothing for {limit_s} s.")
            more = os.read(self._process.stdout.fileno(), 4096)
            if not more:
                break
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode()

    def ask(self, line, limit_s=PROGRAM_LIMIT_S):
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self.hear(limit_s)

    @property
    def pid(self):
        return self._process.pid

    def kill(self):
        self._process.kill()
        self._process.wait()

    def finish(self, limit_s=PROGRAM_LIMIT_S):
        """Closes stdin and returns the exit status."""
        self._process.stdin.close()
        return self.wait(limit_s)

    def wait(self, limit_s):
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise Failure(f"The program does not end within {limit_s} s.") from None

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


# ---- counts -------------------------------------------------------------------------------------


class Stats:
    """What PENSTOCK_STATS wrote."""

    def __init__(self, path):
        with open(path, encoding="utf-8") as file:
            self.data = json.load(file)

    def __getitem__(self, name):
        return self.data[name]

    def function(self, name):
        """(calls, round trips) of a function, over all its versions and stream twins."""
        pattern = re.compile(re.escape(name) + r"(_v\d+)?(_ptds|_ptsz)?$")
        rows = [row for key, row in self.data["functions"].items() if pattern.match(key)]
        return sum(row["calls"] for row in rows), sum(row["round_trips"] for row in rows)


# ---- cases --------------------------------------------------------------------------------------

_cases = {}


def case(function):
    _cases[function.__name__] = function
    return function


def main():
    if len(sys.argv) < 2 or sys.argv[1] not in _cases:
        sys.exit(f"Usage: {sys.argv[0]} CASE [ARGUMENT...], where CASE is one of: {', '.join(_cases)}")
    began = time.monotonic()
    try:
        _cases[sys.argv[1]](*sys.argv[2:])
    except Failure as failure:
        print(f"FAILED: {failure}")
        sys.exit(1)
    print(f"ok ({time.monotonic() - began:.1f} s)")
