"""Drop packets that enter this network namespace by chance: a netfilter rule, given to the kernel by netlink.

    nsenter --net=… python loss.py 20        one of 20 is dropped; 0: drop none

Neither nft nor iptables is needed. The messages are those of linux/netfilter/nf_tables.h and nfnetlink.h.
"""

import os
import socket
import struct
import sys

NETLINK_NETFILTER, NF_TABLES = 12, 10
BATCH_BEGIN, BATCH_END, NEWTABLE, DELTABLE, NEWCHAIN, NEWRULE = 16, 17, 0, 2, 3, 6
REQUEST, ACK, CREATE, NESTED = 1, 4, 0x400, 0x8000
IPV4, LOCAL_IN, ACCEPT, DROP = 2, 1, 1, 0
TABLE, CHAIN = b"hal_loss\0", b"input\0"


def attribute(kind, data):
    """A netlink attribute; integers are big-endian here, lists are nested."""
    if isinstance(data, int):
        data = struct.pack(">I", data)
    elif isinstance(data, list):
        kind, data = kind | NESTED, b"".join(data)
    return struct.pack("=HH", 4 + len(data), kind) + data + bytes(-len(data) % 4)


def expression(name, *attributes):
    """One step of a rule."""
    return attribute(1, [attribute(1, name + b"\0"), attribute(2, list(attributes))])


def message(kind, number, *attributes, flags=ACK | CREATE, subsystem=NF_TABLES):
    """One message to nf_tables, or the begin or end of a batch."""
    batch = kind in (BATCH_BEGIN, BATCH_END)
    body = struct.pack(">BBH", 0 if batch else IPV4, 0, NF_TABLES if batch else 0) + b"".join(attributes)
    head = struct.pack("=IHHII", 16 + len(body), kind if batch else subsystem << 8 | kind, REQUEST | flags, number, 0)
    return head + body


def rule(one_of):
    """A random number below ``one_of`` that is 0 drops the packet."""
    number = expression(b"numgen", attribute(1, 1), attribute(2, one_of), attribute(3, 1))
    is_zero = expression(b"cmp", attribute(1, 1), attribute(2, 0), attribute(3, [attribute(1, bytes(4))]))
    drop = expression(b"immediate", attribute(1, 0), attribute(2, [attribute(2, [attribute(1, DROP)])]))
    return [number, is_zero, drop]


def tell(messages):
    """Send the batch to the kernel, which applies all of it or none."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER) as line:
        line.bind((0, 0))
        begin, end = (message(kind, 0, flags=0) for kind in (BATCH_BEGIN, BATCH_END))
        line.send(begin + b"".join(messages) + end)
        line.settimeout(5.0)
        for _ in messages:
            _, kind, *_ = struct.unpack_from("=IHHII", answer := line.recv(1 << 16))
            error = struct.unpack_from("=i", answer, 16)[0]
            if kind != 2 or error:
                raise OSError(-error, os.strerror(-error))


def main(one_of):
    """Install the rule, or remove all rules."""
    if not one_of:
        tell([message(DELTABLE, 1, attribute(1, TABLE), flags=ACK)])
        return
    hook = attribute(4, [attribute(1, LOCAL_IN), attribute(2, 0)])
    chain = [attribute(1, TABLE), attribute(3, CHAIN), hook, attribute(5, ACCEPT), attribute(7, b"filter\0")]
    tell(
        [
            message(NEWTABLE, 1, attribute(1, TABLE)),
            message(NEWCHAIN, 2, *chain),
            message(
                NEWRULE,
                3,
                attribute(1, TABLE),
                attribute(2, CHAIN),
                attribute(4, rule(one_of)),
                flags=ACK | CREATE | 0x800,
            ),
        ]
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
