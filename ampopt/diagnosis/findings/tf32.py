"""tf32: products in strict FP32 on a GPU that has TF32."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from ampopt.diagnosis.case import Case, eager_call
from ampopt.diagnosis.finding import Finding, saved
from ampopt.ir.lanes import FP32
from ampopt.ir.settings import Settings

_SETTINGS = {
    "allow-tf32": (
        Settings(tf32=True),
        *("products do not use TF32", "in TF32", 'torch.set_float32_matmul_precision("high")'),
    ),
    "search-conv-algorithms": (
        Settings(search_algorithms=True),
        "cuDNN takes the algorithms of its heuristic",
        "with searched algorithms",
        "torch.backends.cudnn.benchmark = True, if shapes do not vary",
    ),
}


def find(case: Case) -> Iterator[Finding]:
    """Executed: a call with TF32, and with cuDNN's algorithm search.

    Each in a new thread: PyTorch keeps cuDNN's plans by thread, also those that were chosen without a search.
    """
    if case.device.type != "cuda":
        return
    own = (case.original, case.args, case.kwargs, case.device, FP32)
    for name, (settings, says, change, advice) in _SETTINGS.items():
        with ThreadPoolExecutor(1) as thread:
            make = functools.partial(eager_call, *own, settings)
            ran = case.remedied(change, FP32, make, elsewhere=thread)
        if ran is not None and ran.helps:
            yield Finding(name, says, advice=advice, share=saved(ran), counterfactual=ran)
