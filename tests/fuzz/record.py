#!/usr/bin/env python3
"""Makes the seeds in corpus/ from real sessions: a proxy stands between programs and a daemon (both
of a finished release build), understands just enough of the wire format to tell messages and frames
apart, and writes what each side said in the form that the fuzzers read.

    PENSTOCK_BUILD=build tests/fuzz/record.py tests/fuzz/corpus

The forms are those of fuzz_hello.cc (a byte says which message), scripted_connection.h (records of
frames) and fuzz_tcp.cc, fuzz_shm.cc (records). Seeds for shared memory are written by hand below.
"""

import hashlib
import os
import socket
import struct
import sys
import threading

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "e2e"))
from harness import *  # noqa: E402

MOST_BYTES = 7_000  # of one seed

# What fuzz_hello.cc calls the messages.
CLIENT_HELLO, CHALLENGE, PROOF, WELCOME, BULK_HELLO, BULK_WELCOME = range(6)
PATH_REQUEST, PATH_OFFER, PATH_DECISION, ROLE = range(6, 10)


def receive(sock, count):
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


class Proxy:
    """Carries connections to `address` and keeps what it carries."""

    def __init__(self, address):
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.messages = []  # (which, bytes)
        self.frames = {"to_server": [], "to_client": []}
        self.bulk = {"to_server": b"", "to_client": b""}
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            client, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _blob(self, source, target, which):
        length = receive(source, 4)
        blob = receive(source, struct.unpack("<I", length)[0])
        target.sendall(length + blob)
        self.messages.append((which, blob))
        return blob

    def _serve(self, client):
        server = socket.create_connection(self._target)
        for sock in (client, server):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        first = receive(client, 4)
        blob = receive(client, struct.unpack("<I", first)[0])
        server.sendall(first + blob)
        bulk = struct.unpack_from("<I", blob, 4)[0] == 2
        self.messages.append((BULK_HELLO if bulk else CLIENT_HELLO, blob))
        self.messages.append((ROLE, blob))
        if bulk:
            self._blob(server, client, BULK_WELCOME)
        else:
            self._blob(server, client, CHALLENGE)
            self._blob(client, server, PROOF)
            self._blob(server, client, WELCOME)
        carry = self._carry_bulk if bulk else self._carry_frames
        for source, target, way in ((client, server, "to_server"), (server, client, "to_client")):
            threading.Thread(target=carry, args=(source, target, way), daemon=True).start()

    def _carry_frames(self, source, target, way):
        try:
            while True:
                head = receive(source, 4)
                length = struct.unpack("<I", head)[0]
                rest = receive(source, (length + 7) // 8 * 8 - 4)
                target.sendall(head + rest)
                self.frames[way].append((head + rest)[:length])
        except (EOFError, OSError):
            target.close()

    def _carry_bulk(self, source, target, way):
        try:
            while data := source.recv(65536):
                target.sendall(data)
                self.bulk[way] += data
        except OSError:
            pass
        target.close()


def write(corpus, kind, data):
    folder = os.path.join(corpus, kind)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, hashlib.sha1(data).hexdigest()[:16]), "wb") as file:
        file.write(data)


def session(frames, switches):
    """Records as scripted_connection.h wants them."""
    data = bytes([switches])
    for frame in frames:
        if len(data) + len(frame) > MOST_BYTES:
            break
        data += struct.pack("<HH", len(frame), 8) + frame
    return data


def tcp_record(kind, data, flags=1):
    return struct.pack("<HBB", len(data), kind, flags) + data


def record(corpus, command, env=None, switches=(0,)):
    with Daemon(arguments=["--transport", "tcp"]) as daemon:
        proxy = Proxy(daemon.address)
        daemon.address = proxy.address
        outcome = run(command, client_env(daemon, PENSTOCK_TRANSPORT="tcp", **(env or {})))
        print(command[0], outcome.status, {way: len(frames) for way, frames in proxy.frames.items()})
    if not os.path.isdir(os.path.join(corpus, "hello")):  # the others differ in numbers only
        for which, blob in proxy.messages:
            write(corpus, "hello", bytes([which]) + blob)
    for value in switches:
        write(corpus, "worker", session(proxy.frames["to_server"], value))
    write(corpus, "client", session(proxy.frames["to_client"], 0))
    data = b"".join(tcp_record(0, frame) for frame in proxy.frames["to_client"][:10])
    for way in proxy.bulk:
        write(corpus, "tcp", (data + tcp_record(2, proxy.bulk[way][:4096]))[:MOST_BYTES])


def bulk_header(kind, count, status=0, slot=0, sequence=0):
    return struct.pack("<IIIIQQQQIIQ", kind, status, slot, sequence, count, 0, count, 0, 0, 0, 0)


def write_tcp(corpus):
    """The answering end, asked for both moves with the true key, and the asking end, answered."""
    get, put, data, done = 0x31544547, 0x31545550, 0x31544144, 0x314E4F44
    asks = tcp_record(2, bulk_header(get, 512)) + tcp_record(2, bulk_header(put, 64) + b"x" * 64)
    write(corpus, "tcp", asks)
    for kind in (3, 4):
        started = struct.pack("<HBB", 512, kind, 1)
        write(corpus, "tcp", started + tcp_record(1, bulk_header(data, 512) + b"y" * 512) +
              tcp_record(1, bulk_header(done, 0)))


def write_shm(corpus):
    def at(kind, position, data, flags=1):
        return struct.pack("<HBBH", len(data), kind, flags, position) + data

    def advance(eighths):
        return struct.pack("<HBBH", eighths, 3, 1, 0)

    frame = struct.pack("<I", 64) + b"f" * 60
    two_frames = at(2, 0, frame) + at(2, 8, frame) + advance(8) + advance(8)
    link = struct.Struct("<IIIIQIIQQQ16s")
    share = struct.pack("<HBBH", 0, 4, 2 + 4 + 8 + 1, 0) + link.pack(
        0, 3, 1, 0, 0, 0, 3, 1, 0, 99, b"")
    unshare = struct.pack("<HBBH", 0, 4, 1, 0) + link.pack(0, 4, 1, 0, 0, 0, 0, 1, 0, 0, b"")
    move = struct.pack("<HBBH", 4000, 6, 1, 0) + struct.pack("<HBBH", 9000, 7, 1, 0)
    send = struct.pack("<HBBH", 100, 8, 1, 0)
    request = struct.pack("<IIIIQQQQ", 1, 0, 1, 64, 0, 0, 0, 64) + struct.pack("<I", 1)
    for end in (b"\0", b"\1"):
        write(corpus, "shm", end + two_frames + send + send)
        write(corpus, "shm", end + share + two_frames + unshare + share)
        write(corpus, "shm", end + move + at(1, 0, request) + at(1, 8, struct.pack("<II", 1, 0)))
        write(corpus, "shm", end + at(0, 0, struct.pack("<Q", 1 << 40)) + at(5, 0, b"w" * 72))


def write_paths(corpus):
    text = b"".ljust(200, b"\0")
    address = b"127.0.0.1".ljust(64, b"\0")
    magic = 0x4B534E50
    write(corpus, "hello", bytes([PATH_REQUEST]) + struct.pack("<IIQ", magic, 2, 0))
    for path in (1, 2, 3):
        rails = 0 if path == 1 else 1
        write(corpus, "hello", bytes([PATH_OFFER]) +
              struct.pack("<IIIIII", magic, path, 0, 4242 * rails, rails, 0) + address * rails +
              bytes(64 * (4 - rails)) + text)
        write(corpus, "hello", bytes([PATH_DECISION]) + struct.pack("<II", magic, path) + text)


def write_rdma(corpus):
    """One lie each: fields of wire.h, in a packet and in a connection request, at either end."""
    for switches in (0, 1, 20):
        write(corpus, "rdma", bytes([switches]))
        for message, place, width, value in (
                (0, 0, 2, 0), (0, 4, 1, 0xffff), (1, 6, 1, 1), (1, 8, 3, 99), (0, 16, 3, 1 << 40),
                (1, 24, 2, 7), (1, 40, 1, 9), (0, 56, 2, 5000), (0, 0, 4, 30), (0x80, 0, 2, 1),
                (0x80, 5, 0, 2), (0x80, 6, 0, 200), (0x80, 10, 1, 60000), (0x80, 24, 3, 0),
                (0x81, 8, 1, 0), (0x80, 0, 4, 20), (0x7f, 8, 3, 1 << 60), (0x7f, 24, 3, 0)):
            edit = struct.pack("<BBH4xQ", message, width, place, value)
            write(corpus, "rdma", bytes([switches]) + edit)


# A link and a list of functions, with as little around them as can be: a seed is short.
LINK = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
context, state, module, image = (ctypes.c_void_p() for _ in range(4))
size, count, function = ctypes.c_size_t(), ctypes.c_uint(), ctypes.c_void_p()
cuda.cuInit(0)
cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0)
ptx = b".version 6.3\\n.target sm_70\\n.address_size 64\\n.visible .entry k() { ret; }\\n"
for _ in range(2):
    cuda.cuLinkCreate_v2(0, None, None, ctypes.byref(state))
    cuda.cuLinkAddData_v2(state, 1, ptx, ctypes.c_size_t(len(ptx) + 1), b"k.ptx", 0, None, None)
    cuda.cuLinkComplete(state, ctypes.byref(image), ctypes.byref(size))
    cuda.cuModuleLoadData(ctypes.byref(module), image)
    cuda.cuLinkDestroy(state)
    cuda.cuModuleGetFunctionCount(ctypes.byref(count), module)
    cuda.cuModuleEnumerateFunctions(ctypes.byref(function), 1, module)
"""


def main():
    corpus = sys.argv[1]
    write_tcp(corpus)
    write_shm(corpus)
    write_rdma(corpus)
    record(corpus, [sample("ptx_only", "vector_add")], switches=(0, 1))
    record(corpus, [sample("static", "driver_api_ptx")], switches=(0, 1, 2))
    record(corpus, [sample("ptx_only", "two_streams")])
    record(corpus, [sample("ptx_only", "constant_symbols")])
    record(corpus, [sample("ptx_only", "kernel_printf")])
    record(corpus, [sample("ptx_only", "histogram_atomics")], switches=(1,))
    for name in ("bad_handles", "bad_addresses", "memory_numbers", "small_rules", "device_reset",
                 "forks", "before_init"):
        record(corpus, [program(name)])
    record(corpus, [sys.executable, "-c", LINK])
    write_paths(corpus)


if __name__ == "__main__":
    main()
