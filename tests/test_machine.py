"""What the process takes of the machine."""

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import numpy as np
from rl import machine

if sys.argv[1] == "keep":
    machine.keep_freed_memory()
np.ones(2**26, np.uint8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    np.ones(2**26, np.uint8)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> int:
    """Pages that ten arrays of 64 MiB, one after the other, had to be given anew."""
    output = subprocess.run([sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, check=True)
    return int(output.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_freed_memory_is_used_again() -> None:
    pages = 2**26 // 4096
    assert page_faults("plain") > 5, "each array gets new pages (huge ones, perhaps)"
    assert page_faults("keep") < min(pages, page_faults("plain")) / 2
