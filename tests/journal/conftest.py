"""Ready-made jobs, as the manifest's tests have them."""

from manifest.conftest import make_job

__all__ = ["make_job"]
