#!/usr/bin/env python3
"""penstock-perf measures something under every name that it promises; the figures mean nothing here."""

import json
import socket

from harness import *

PERF = f"{BUILD}/bin/penstock-perf"
COPIES = [f"{way}, {kind}" for way in ("host to device", "device to host")
          for kind in ("pinned", "pageable")]


def _rows(command, env):
    outcome = check_ok(run(command, env), " ".join(command))
    rows = json.loads(outcome.out)
    for row in rows:
        check(row["value"] > 0, f"({row}) has no value.")
    return {(row["name"], row["bytes"]) for row in rows}


@case
def transport():
    names = _rows([PERF, "tcp", "--seconds", "0.01", "--most", "256KiB", "-o", "json"], plain_env())
    expected = {("round trip of a message", size) for size in (96, 1024, 3072)}
    expected |= {(f"bulk, {way} the server", size) for way in ("to", "from")
                 for size in (64 << 10, 256 << 10)}
    check_equal(names, expected | {("messages, one way", 96)}, "The rows")


@case
def plot():
    """The picture is a PNG of the size that it should have, and no picture is no success."""
    with Scratch() as scratch:
        picture = scratch / "it's.png"
        command = [PERF, "tcp", "--seconds", "0.01", "--most", "256KiB", "--plot", picture]
        check_ok(run(command, plain_env()), "penstock-perf --plot")
        with open(picture, "rb") as file:
            head = file.read(24)
        check_equal((head[:8], int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")),
                    (b"\x89PNG\r\n\x1a\n", 1200, 750), "The picture")
        nowhere = run([*command[:-1], "/nowhere/picture.png"], plain_env())
        check(nowhere.status != 0 and "gnuplot does not draw (/nowhere/picture.png)" in nowhere.err,
              f"Where it cannot write it says ({nowhere.err}).")
        sizeless = run([*command, "--only", "no such row"], plain_env())
        check(sizeless.status != 0, "Nothing is drawn, and it says nothing of that.")


@case
def two_ends():
    """The serving end takes one client after the other, and what is no client does not end it."""
    with Daemonless() as ends:
        for _ in range(2):
            _rows([PERF, "tcp", "--connect", ends.address, "--seconds", "0.01", "--most", "64KiB",
                   "-o", "json"], plain_env())
            with socket.create_connection(ends.host_and_port) as stranger:
                stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")


class Daemonless:
    """A serving end, at a port that it says on stderr."""

    def __enter__(self):
        self._process = start([PERF, "tcp", "--serve", "127.0.0.1:0"], plain_env(),
                              stderr=subprocess.PIPE, text=True)
        line = self._process.stderr.readline()
        self.host_and_port = ("127.0.0.1", int(re.search(r"port (\d+)", line)[1]))
        self.address = "%s:%d" % self.host_and_port
        return self

    def __exit__(self, *_):
        check(self._process.poll() is None, "The serving end is gone.")
        self._process.kill()
        self._process.wait()


@case
def device():
    with Scratch() as scratch:
        files = []
        for index, (command, env) in enumerate([([PERF], direct_env()),
                                                ([PENSTOCK, "run", "--sim", "--", PERF], plain_env())]):
            command = [*command, "device", "--seconds", "0.01", "--most", "1MiB", "-o", "json"]
            names = _rows(command, env)
            expected = {("cuMemGetInfo", 0), ("launch, posted", 0), ("launch + synchronize", 0)}
            expected |= {(name, size) for name in COPIES for size in (4, 4096, 65536, 1 << 20)}
            check_equal(names, expected, "The rows")
            files.append(scratch / f"rows{index}")
            with open(files[-1], "w", encoding="ascii") as file:
                file.write(run(command, env).out)
        table = check_ok(run([PERF, "compare", *files], plain_env()), "compare").out.splitlines()
        check_equal(len(table), 1 + len(names), "The number of lines")
        for line in table[1:]:
            check(re.search(r"\d+\.\d\d +rows0$", line), f"({line}) has no ratio.")
        missing = run([PERF, "compare", files[0], "/nowhere"], plain_env())
        check(missing.status != 0 and "/nowhere" in missing.err, f"({missing}) names no file.")


main()
