"""python -m tests.model_coverage [TYPE ...]: writes docs/models.md. With types: prints their rows only."""

import sys

from raylens.modeling.torchvision_build import make_importable

make_importable()

from tests.model_coverage.report import write_page  # noqa: E402  (transformers needs the line above)

if __name__ == "__main__":  # other processes import this file
    write_page(sys.argv[1:])
