"""The lab's own tests: what it promises to the tests of the transport. One boot or two for each.

    cases.py CASE
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

LAB = pathlib.Path(__file__).resolve().parent / "lab"

# between SERVER_ARGUMENTS CLIENT_ARGUMENTS PROGRAM...: both sides of a perftest; prints the client's table.
BETWEEN = """
between() {
  server=$1 client=$2
  shift 2
  timeout 120 "$@" $server >/tmp/server 2>&1 &
  case $* in *" -R "*) lab-listening ;; *) lab-listening 18515 ;; esac
  timeout 120 "$@" $client >/tmp/client 2>&1 || { cat /tmp/server /tmp/client; exit 1; }
  wait $! || { cat /tmp/server; exit 1; }
  grep -A1 '#bytes' /tmp/client | sed "s/^/$1: /"
}
"""


def lab(*arguments):
    """Runs the lab; its exit status, output and errors (which are printed too)."""
    done = subprocess.run([LAB, *map(str, arguments)], capture_output=True, text=True)
    print(done.stdout, done.stderr, sep="\n", flush=True)
    return done.returncode, done.stdout, done.stderr


def check(truth, sentence):
    if not truth:
        sys.exit(f"cases: not so: {sentence}")


def single():
    """Perftest's three programs run over rxe0, and the exit status of the command comes back."""
    status, out, _ = lab("single", "--", "sh", "-ec", BETWEEN + """
        between "" 10.9.0.1 ib_send_lat -R -s 128 -n 1000
        between "" 10.9.0.1 ib_read_bw -R -s 1048576 -n 20
        between "" 10.9.0.1 ib_write_bw -R -s 1048576 -n 20
        exit 7""")
    check(status == 7, "the command's exit status (7) is the lab's")
    for line in ("ib_send_lat:  128 ", "ib_read_bw:  1048576 ", "ib_write_bw:  1048576 "):
        check(line in out, f"the output has the line of {line}")


def rails():
    """Both rails carry real packets: loss makes the sender repeat itself, a rail that is down stops."""
    status, out, _ = lab("rails", "--", "sh", "-ec", BETWEEN + """
        near() { between "-d rb -x 1" "-d ra -x 1 10.8.0.2" ib_write_bw -s 65536 -n "$1"; }
        far() { between "-d rd -x 1" "-d rc -x 1 10.8.1.2" ib_write_bw -s 65536 -n "$1"; }
        near 100
        far 100
        echo "before: $(rdma statistic show link ra)"
        lab-rail 0 loss 5
        near 30
        lab-rail 0 loss 0
        echo "after: $(rdma statistic show link ra)"
        lab-rail 1 down
        sleep 0.5
        rdma link show rc/1
        ib_write_bw -d rd -x 1 -s 4096 -n 10 >/dev/null 2>&1 &
        sleep 1
        timeout 10 ib_write_bw -d rc -x 1 -s 4096 -n 10 10.8.1.2 >/dev/null 2>&1 && exit 1
        kill $! 2>/dev/null || true
        lab-rail 1 up
        sleep 1
        rdma link show rc/1
        far 100""")
    check(status == 0, "the script ends well")
    counts = [sum(int(number) for number in re.findall(r"(?:rcvd_seq_err|retry_rnr_exceeded|"
              r"completer_retry_err|retry_exceeded_err|send_err|out_of_seq_request) (\d+)", line))
              for line in out.splitlines() if line.startswith(("before:", "after:"))]
    check(len(counts) == 2 and counts[1] > counts[0], f"loss is seen in the counters {counts}")
    check(re.search("rc/1 state DOWN", out) and re.search("rc/1 state ACTIVE", out),
          "the device follows its rail")
    check(out.count("ib_write_bw:  65536 ") == 4, "four transfers give a line")


def two_hosts():
    """Two machines exchange data; one loses power; user, limit, environment and files are as asked."""
    with tempfile.TemporaryDirectory() as folder:
        status, out, errors = lab(
            "two-hosts", "--user", 1000, "--memlock", 16 << 20, "--env", "WORDS=a 'b' $c", "--out", folder,
            "--cpus", 1, "--memory", 768, "--peer",
            "for port in 9000 9001; do (echo alive | nc -l -p $port) & done; "
            "(lab-listening && lab-host signal ready) & "
            "ib_send_lat -R -s 128 -n 500 && lab-host signal over; sleep 1000",
            "sh", "-ec", """
            echo "user $(id -u), memlock $(ulimit -l), words $WORDS"
            lab-host await ready
            timeout 120 ib_send_lat -R -s 128 -n 500 10.7.0.2
            lab-host await over
            nc 10.7.0.2 9000 </dev/null
            lab-host kill 2
            timeout 3 nc 10.7.0.2 9001 </dev/null || echo dead
            head -c 100000 /dev/zero >/out/zeros
            echo bytes >/dev/stderr
            lab-host await nothing &""")
        check(status == 0, "the script ends well")
        zeros = pathlib.Path(folder, "zeros").read_bytes()
        check(zeros == bytes(100000), "the file comes back whole")
    check("user 1000, memlock 16384, words a 'b' $c" in out, "user, limit and environment are as asked")
    check(re.search(r"^ 128 +500 ", out, re.MULTILINE), "ib_send_lat gives its line")
    check("alive\ndead\n" in out, "host 2 answers until it is killed")
    check("host2: " in errors and "host 2 is killed" in errors, "host 2 is heard, and its end told")


def complaint():
    """A kernel warning fails a run whose command succeeds; a command that hangs is stopped in time."""
    status, out, errors = lab("single", "sh", "-c", "echo 'WARNING: a test' >/dev/kmsg; echo fine")
    check(status == 123 and "fine" in out, "the run fails for the kernel's sake, status 123")
    check("WARNING: a test" in errors, "the kernel's line is printed")
    status, _, errors = lab("single", "--timeout", 4, "sleep", "1000")
    check(status == 124 and "time limit" in errors, "the machine is stopped, status 124")


if __name__ == "__main__":
    cases = {case.__name__: case for case in (single, rails, two_hosts, complaint)}
    os.environ.setdefault("PENSTOCK_BUILD", str(LAB.parents[2] / "build"))
    cases[sys.argv[1]]()
