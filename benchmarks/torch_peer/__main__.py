"""PyTorch beside ours: run by an interpreter that has torch, and that has nothing of ours.

    python benchmarks/torch_peer

Reads a JSON object a line from standard input and answers each with one on standard output:

  {"prepare": name, "kind": "attention" | "train_step" | "decode", ...}  → what there is to say
  {"run": name, "what": program, "calls": n}                             → {"seconds": of one call}
  {"peak": name, "what": program}                                        → {"bytes": … or null}
  {"drop": name}                                                         → {}

or with {"error": text} instead. The other side decides who is measured when.
"""

import ctypes
import json
import os
import sys
import time

import torch
from attending import attention
from decoding import decode
from stepping import train_step

KINDS = {"attention": attention, "train_step": train_step, "decode": decode}


def seconds(program, calls):
    start = time.perf_counter()
    for _ in range(calls):
        program()
    return (time.perf_counter() - start) / calls


def peak_bytes(program):
    """How much the resident memory of this process grows during a call, where Linux tells."""
    try:
        # What earlier calls have freed would be used again and not counted.
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        before = _status("VmRSS")
        program()
        return _status("VmHWM") - before
    except OSError:
        return None


def _status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))


class Peer:
    """The programs that were prepared, by name."""

    def __init__(self):
        self.programs = {}

    def answer(self, request):
        if "prepare" in request:
            self.programs[request["prepare"]], said = KINDS[request["kind"]](request)
            return said
        if "run" in request:
            program = self.programs[request["run"]][request["what"]]
            return {"seconds": seconds(program, request["calls"])}
        if "peak" in request:
            return {"bytes": peak_bytes(self.programs[request["peak"]][request["what"]])}
        del self.programs[request["drop"]]
        return {}


def main():
    # Answers go to the real standard output; whatever a library prints goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = Peer()
    hello = {"version": torch.__version__, "threads": torch.get_num_threads()}
    print(json.dumps(hello), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = peer.answer(json.loads(line))
        except Exception as error:  # told to the other side, which shows it in its table
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
