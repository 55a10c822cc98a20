"""Every test runs on one thread and starts from the same seed, so that a failure can be seen again."""

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _torch_seed() -> None:
    torch.manual_seed(0)
