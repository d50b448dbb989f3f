#!/usr/bin/env python3
"""The ways in which programs come to our libcuda.so.1, and what they see of the devices."""

from harness import *
from several import Two

LOOK = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
count = ctypes.c_int()
print(cuda.cuInit(0), cuda.cuDeviceGetCount(ctypes.byref(count)), count.value)
"""


@case
def opened_by_name():
    """A program that knows nothing of CUDA until it opens the library: with the preload, and with the
    library's folder alone."""
    with Daemon() as daemon:
        preloaded = client_env(daemon)
        found = {**preloaded, "LD_LIBRARY_PATH": os.path.dirname(INTERPOSER)}
        del found["LD_PRELOAD"]
        for env in (preloaded, found):
            check_equal(check_ok(run([sys.executable, "-c", LOOK], env), "It").out, "0 0 1\n",
                        "What it prints")


@case
def bare_environment():
    """Nothing but the preload and the server: no HOME, no PATH."""
    with Daemon() as daemon:
        env = {"LD_PRELOAD": INTERPOSER, "PENSTOCK_SERVER": daemon.address}
        check_equal(run([program("device_count")], env).out, "1\n", "The count")
        nowhere = run([program("device_count")], {"LD_PRELOAD": INTERPOSER})
        check(nowhere.status != 0 and "No GPU server is named" in nowhere.err,
              f"Without a server it says ({nowhere.err}).")


@case
def shells():
    """The preload is in every process of a script, and disturbs none that does not ask for a device."""
    script = (f"ls / >/dev/null && echo a | cat && {program('device_count')} && "
              f"({program('device_count')}) && sh -c 'exit 7'; echo $?")
    with Daemon() as daemon:
        outcome = run(["sh", "-c", script], client_env(daemon))
        check_equal((outcome.out, outcome.err), ("a\n1\n1\n7\n", ""), "A script")


@case
def again():
    """Twice in a row, then two at once, on one daemon."""
    with Daemon() as daemon:
        for _ in range(2):
            check_ok(run([sample("static", "vector_add")], client_env(daemon)), "vector_add")
        both = [start([sample("static", "matrix_multiply")], client_env(daemon),
                      stdout=subprocess.PIPE, text=True) for _ in range(2)]
        outputs = [process.communicate(timeout=PROGRAM_LIMIT_S)[0] for process in both]
        check_equal([process.returncode for process in both], [0, 0], "Their statuses")
        check_equal(outputs[0], outputs[1], "What they print")


@case
def visible_devices():
    """CUDA_VISIBLE_DEVICES by number, by UUID, with a hole and empty: as on one machine with all of
    them."""
    uuids = run([sys.executable, "-c", UUIDS], direct_env(SIMGPU_DEVICES="2")).out.split()
    check_equal(len(uuids), 2, "The number of devices")
    with Daemon(SIMGPU_DEVICES="2") as daemon:
        for wanted in (None, "0", "1", "1,0", "0,1", "0,7,1", "-1", "", uuids[1], uuids[1].upper()[:4] + uuids[1][4:],
                       f"{uuids[1]},{uuids[0]}", "1,1", "GPU-ffffffff"):
            more = {} if wanted is None else {"CUDA_VISIBLE_DEVICES": wanted}
            local = run([sys.executable, "-c", UUIDS], direct_env(SIMGPU_DEVICES="2", **more))
            remote = run([sys.executable, "-c", UUIDS], client_env(daemon, PENSTOCK_GPUS="all", **more))
            check_equal(remote.out, local.out, f"What ({wanted}) shows")
    with Two() as two:
        outcome = run([program("device_count")], two.env("4", CUDA_VISIBLE_DEVICES="3,1"))
        check_equal(outcome.out.strip(), "2", "What is left of four on two servers")


UUIDS = """
import ctypes, uuid
cuda = ctypes.CDLL("libcuda.so.1")
count = ctypes.c_int()
status = cuda.cuInit(0)
if status:
    print("cuInit gives", status)
else:
    cuda.cuDeviceGetCount(ctypes.byref(count))
    for number in range(count.value):
        name = (ctypes.c_ubyte * 16)()
        cuda.cuDeviceGetUuid_v2(name, number)
        print("GPU-" + str(uuid.UUID(bytes=bytes(name))))
"""


@case
def unserved():
    """What is exported and not served says so, once for each function, and does nothing."""
    look = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
cuda.cuInit(0)
print([cuda.cuGraphCreate(None, 0) for _ in range(3)], cuda.cuIpcCloseMemHandle(ctypes.c_ulonglong(1)))
"""
    with Daemon() as daemon:
        outcome = run([sys.executable, "-c", look], client_env(daemon))
        check_equal(outcome.out, "[801, 801, 801] 801\n", "What it gets")
        for name in ("cuGraphCreate", "cuIpcCloseMemHandle"):
            check_equal(outcome.err.count(name), 1, f"How often ({name}) is in ({outcome.err})")


if __name__ == "__main__":
    main()
