"""The store of a launch on a socket that is given: python -m ... DESCRIPTOR; until stdin ends."""

import socket
import sys

import torch.distributed as dist


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    address, port = listener.getsockname()
    store = dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    sys.stdin.read()
    del store


if __name__ == "__main__":
    main()
