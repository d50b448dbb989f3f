"""Two rails with real packets: loss, a cut, a rail that goes down, under real programs.

    rails.py [CASE...]
"""

import re

from boot import boot, case, check, check_copies_end_well, check_ran, numbers

RAILS = "PENSTOCK_TRANSPORT=rdma PENSTOCK_RDMA_RAILS=10.8.0.1,10.8.1.1"

# serve: a daemon that offers both rails. The client's devices are ra and rc.
SERVE = r"""
serve() {
  for rail in 0 1; do  # whatever an earlier case left
    lab-rail $rail up
    lab-rail $rail loss 0
  done
  printf '[transport]\nrdma-addresses = ["10.8.0.2", "10.8.1.2"]\n' >config
  daemon 10.8.0.2 --config config --log info
}
counter() { rdma statistic show link $1/1 | sed "s/.* $2 \([0-9]*\).*/\1/"; }
both() { lab-rail 0 "$@"; lab-rail 1 "$@"; }
"""


@case(seconds=60)
def perftest():
    """Both rails carry real packets: loss makes the sender repeat itself, and a device follows its rail."""
    out = yield SERVE + """
        write() {  # RAIL COUNT
          case $1 in 0) near=ra far=rb ;; 1) near=rc far=rd ;; esac
          timeout 30 ib_write_bw -d $far -x 1 -s 65536 -n $2 >server 2>&1 &
          lab-listening 18515
          timeout 30 ib_write_bw -d $near -x 1 -s 65536 -n $2 10.8.$1.2 >client 2>&1 || return 1
          wait $!
          grep '^ 65536 ' client
        }
        sent() { echo "sent $1 $(counter ra sent_pkts)"; }
        sent before
        write 0 50
        sent clean
        lab-rail 0 loss 5
        write 0 50
        sent lossy
        lab-rail 0 loss 0
        lab-rail 1 down
        sleep 0.5
        rdma link show rc/1
        lab-rail 1 up
        sleep 0.5
        rdma link show rc/1
        write 1 50"""
    sent = numbers(out, "sent")
    clean, lossy = sent["clean"] - sent["before"], sent["lossy"] - sent["clean"]
    packets = 50 * 65536 / 4096
    check(packets <= clean, f"({packets:.0f}) packets of data are sent in at least as many ({clean:.0f})")
    check(lossy >= clean + 0.02 * packets, f"loss takes ({lossy:.0f}) packets instead of ({clean:.0f})")
    check("state DOWN" in out and "state ACTIVE" in out, "the device follows its rail")
    check(len(re.findall("^ 65536 ", out, re.MULTILINE)) == 3, "three transfers give a line")


@case(seconds=120)
def conformance():
    """The transports' suite for bulk data, over two rails."""
    out = yield """
        PENSTOCK_TEST_RDMA="10.8.0.2<10.8.0.1,10.8.1.2<10.8.1.1" PENSTOCK_LOG=error \
          transport_conformance_test [bulk]"""
    check("All tests passed" in out, "the suite passes")


@case(seconds=100)
def loss():
    """5 % of all packets are lost, both ways: every byte is right and no error comes."""
    out = yield SERVE + f"""
        serve
        both loss 5
        run vector_add {RAILS} $samples/vector_add
        copy {RAILS}
        finish
        for rail in 0 1; do
          for link in $(case $rail in 0) echo va vb ;; 1) echo vc vd ;; esac); do
            tc -s qdisc show dev $link | sed -n "s/.*dropped \\([0-9]*\\).*/dropped $link \\1/p"
          done
        done
        both loss 0"""
    check_ran(out, "vector_add", "rdma")
    check_copies_end_well(out)
    dropped = numbers(out, "dropped")
    check(len(dropped) == 4 and min(dropped.values()) >= 5, f"packets are lost everywhere ({dropped})")


@case(seconds=90)
def short_cut():
    """Nothing gets through for two seconds, which is longer than the queue pairs try: the session
    goes on, and no error comes."""
    out = yield SERVE + f"""
        serve
        copy {RAILS}
        both loss 100
        sleep 2
        both loss 0
        await_rounds 3
        finish
        sed 's/^/daemon says: /' daemon"""
    check_copies_end_well(out)
    check(re.search("says: .*(Another one is awaited|made anew|is down)", out),
          "the cut is long enough to be noticed")


@case(seconds=120)
def rail_down():
    """The rail with the control queue pair goes down in the middle of copies: every byte is right and
    no error comes, the other rail carries it all, and this one is used again when it is back."""
    out = yield SERVE + f"""
        serve
        copy {RAILS}
        lab-rail 0 down
        await_line copies.err "Rail 0 (.*is down" 20
        before=$(counter rc rcvd_pkts)
        await_rounds 2
        echo "packets rail_1 $(($(counter rc rcvd_pkts) - before))"
        lab-rail 0 up
        echo "at up $(now)"
        await_line copies.err "Rail 0 (.*is used again" 30
        echo "at again $(now)"
        before=$(counter ra rcvd_pkts)
        await_rounds 2
        echo "packets rail_0 $(($(counter ra rcvd_pkts) - before))"
        finish
        sed 's/^/daemon says: /' daemon"""
    check_copies_end_well(out)
    # A round is some 1,300 packets of data, each way.
    packets = numbers(out, "packets")
    check(packets["rail_1"] > 2000, f"the other rail carries two rounds ({packets['rail_1']:.0f} packets)")
    check(packets["rail_0"] > 400, f"this one carries its share again ({packets['rail_0']:.0f} packets)")
    at = numbers(out, "at")
    took = at["again"] - at["up"]
    check(took < 10, f"the rail is used again within ten seconds of its return ({took:.1f} s)")


boot("rails", [perftest, conformance, loss, short_cut, rail_down])
