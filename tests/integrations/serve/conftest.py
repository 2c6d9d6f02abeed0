import pytest

pytest.importorskip("ray", reason="has an environment of its own: make test-ray")
