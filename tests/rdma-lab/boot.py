"""Several cases in one boot of the lab, since a boot takes longer than most cases.

A case is a generator. It yields the script that the machine runs (with two hosts: a pair of scripts, the
second host 2's), gets what they printed, errors included, and checks it. Each case has a folder of its
own, which is its working directory, and a limit of its own (`seconds`); if one fails the others still
count. A kernel that complains fails the whole boot.
"""

import os
import pathlib
import re
import resource
import subprocess
import sys
import time

LAB = pathlib.Path(__file__).resolve().parent / "lab"
os.environ.setdefault("PENSTOCK_BUILD", str(LAB.parents[2] / "build"))

# What scripts share. `penstockd` and the programs are on board in the build folder.
HELPERS = r"""
samples=/build/bin/samples/static programs=/build/bin/e2e
(umask 077; printf 0123456789abcdef0123 >key)
export PENSTOCK_KEY_FILE=$PWD/key
export PENSTOCK_RDMA_TIMEOUT=20000  # the machine may be slow
now() { cut -d ' ' -f 1 /proc/uptime; }

# daemon ADDRESS [OPTION...] starts one; it ends with the case. Its log is the file daemon.
daemon() {
  stop_daemon
  address=$1
  shift
  penstockd --driver sim --listen $address:14833 --key-file key "$@" 2>>daemon &
  echo $! >/tmp/daemon.pid
  lab-listening 14833
}

# run LABEL [VARIABLE=VALUE...] PROGRAM [ARGUMENT...]: its end, way, output and statistics.
run() {
  label=$1 variables=
  shift
  while case $1 in *=*) true ;; *) false ;; esac do
    variables="$variables $1"
    shift
  done
  rm -f stats
  status=0
  env PENSTOCK_STATS=stats $variables timeout 100 penstock run --server $address:14833 -- "$@" \
    >out 2>err || status=$?
  echo "$label: status $status, over $(sed -n 's/.*"transport": "\(.*\)".*/\1/p' stats)"
  sed "s/^/$label prints: /" out
  sed "s/^/$label says: /" err
  echo "$label counts: $(tr -d '\n' <stats)"
}

# copy [VARIABLE=VALUE...]: a program that copies in the background; `finish` ends it.
copy() {
  rm -f enough
  env PENSTOCK_LOG=info "$@" penstock run --server $address:14833 -- \
    $programs/copies_until enough >copies 2>copies.err &
  copies=$!
  await_rounds 2
}
rounds() { grep -c '^round [0-9]*$' copies || true; }
await_rounds() {  # so many more, each of them right
  target=$(($(rounds) + $1))
  for try in $(seq 300); do
    [ "$(rounds)" -lt $target ] || return 0
    kill -0 $copies 2>/dev/null || break
    sleep 0.2
  done
  echo "The copies stand at ($(rounds)) of ($target) rounds."
  return 1
}
finish() {
  touch enough
  wait $copies && echo "copies: status 0" || echo "copies: status $?"
  tail -n 1 copies
  sed 's/^/copies say: /' copies.err
}
await_line() {  # FILE PATTERN SECONDS
  for try in $(seq $(($3 * 5))); do
    ! grep -q "$2" "$1" 2>/dev/null || return 0
    sleep 0.2
  done
  echo "After $3 s there is no line of ($2) in $1."
  return 1
}
"""

# Around the cases, in the machine.
DRIVER = r"""
stop_daemon() {
  [ -e /tmp/daemon.pid ] || return 0
  kill $(cat /tmp/daemon.pid) 2>/dev/null || true
  while kill -0 $(cat /tmp/daemon.pid) 2>/dev/null; do sleep 0.05; done
  rm -f /tmp/daemon.pid
}
case_of_boot() {  # NAME SECONDS
  mkdir -m 777 /tmp/$1
  cd /tmp/$1
  status=0
  echo "@@ begin $1"
  timeout -k 5 $2 /bin/sh -e /tmp/case-$1 2>&1 </dev/null || status=$?  # not busybox's sh
  [ $status = 0 ] || for file in copies copies.err daemon; do
    [ ! -e $file ] || tail -n 30 $file | sed "s/^/  $file: /"
  done
  echo "@@ end $1 $status"
  stop_daemon
}
"""


STATUS = 42  # of the whole script, which the lab has to give back


class Untrue(Exception):
    pass


def check(truth, sentence):
    if not truth:
        raise Untrue(f"not so: {sentence}")


def check_ran(out, label, transport, words=""):
    """`run` of this label ended well, over this transport, and printed the words."""
    check(f"{label}: status 0, over {transport}\n" in out, f"{label} ends well over {transport}")
    check(re.search(f"^{label} prints: .*{words}", out, re.MULTILINE), f"{label} prints ({words})")


def check_copies_end_well(out):
    check(re.search("^copies: status 0$", out, re.MULTILINE) and "copies_until: ok\n" in out,
          "the program that copies ends well, with every byte right")


def check_copies_fail(out):
    check(re.search("^copies: status 3$", out, re.MULTILINE) and
          re.search(r"^round \d+ fails: CUDA_ERROR", out, re.MULTILINE),
          "the program that copies gets an error")


def numbers(out, word):
    """What follows the word at the beginning of lines, as numbers by name: `at up 12.5`."""
    return {name: float(value)
            for name, value in re.findall(rf"^{word} (\S+) ([\d.]+)$", out, re.MULTILINE)}


def lab(*arguments):
    """Runs the lab; its exit status, output and errors."""
    done = subprocess.run([LAB, *map(str, arguments)], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def _script(pieces):
    """One script out of the cases' (name, seconds, text)."""
    lines = [DRIVER]
    for name, _, text in pieces:
        lines.append(f"cat >/tmp/case-{name} <<'@@ of {name}'\n"
                     f"{DRIVER}{HELPERS}\n{text}\n@@ of {name}")
    lines += [f"case_of_boot {name} {seconds}" for name, seconds, _ in pieces]
    return "\n".join([*lines, f"exit {STATUS}"])


def _found(name, out):
    return re.search(rf"^@@ begin {name}\n(.*?)^@@ end {name} (\d+)$", out, re.DOTALL | re.MULTILINE)


def _verdict(generator, status, out):
    """Nothing if the case is content, else what it says."""
    if status != "0":
        return f"the script ends with status {status}"
    try:
        generator.send(out)
    except StopIteration:
        return ""
    except Untrue as untrue:
        return str(untrue)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        return f"a line is missing ({error!r})"
    return "the case yields twice"


def case(seconds):
    """Marks a generator as a case of this limit."""
    def mark(function):
        function.seconds = seconds
        return function
    return mark


def boot(recipe, cases, *options):
    """Runs those cases whose names are on the command line (all, if none is) and exits."""
    chosen = [each for each in cases if each.__name__ in sys.argv[1:] or not sys.argv[1:]]
    if not chosen:
        sys.exit(f"boot: the cases are {[each.__name__ for each in cases]}")
    started = time.monotonic()
    generators = {each.__name__: each() for each in chosen}
    pieces, peers = [], []
    for each in chosen:
        text = next(generators[each.__name__])
        text, peer = (text, None) if isinstance(text, str) else text
        pieces.append((each.__name__, each.seconds, text))
        if peer is not None:
            peers.append((each.__name__, each.seconds, peer))
    if recipe == "two-hosts":
        options = [*options, "--peer", _script(peers)]
    limit = 30 + sum(seconds for _, seconds, _ in pieces)
    status, out, errors = lab(recipe, "--timeout", limit, *options, "--", "sh", "-ec", _script(pieces))
    print(out, errors, sep="\n")
    heard = "".join(re.findall("^host2: (.*\n)", errors, re.MULTILINE))
    failed = 0
    for name, generator in generators.items():
        found = _found(name, out)
        beyond = _found(name, heard)
        complaint = _verdict(generator, found[2], found[1] + (beyond[1] if beyond else "")) \
            if found else "it does not come to its end"
        failed += complaint != ""
        print(f"{recipe}: {name}: {'FAILED: ' + complaint if complaint else 'passed'}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{recipe}: {len(chosen)} cases, {failed} failed, {time.monotonic() - started:.0f} s "
          f"({used.ru_utime + used.ru_stime:.0f} s of a processor)")
    if status != STATUS:
        print(f"{recipe}: FAILED: the lab ends with status {status}")
    sys.exit(1 if failed or status != STATUS else 0)
