"""Python runs this at startup, in the processes that tests spawn too."""

import os

if "QSHARD_UPSTREAM_FORMAT" in os.environ:
    if os.environ["QSHARD_UPSTREAM_ON_CPU"]:
        import on_cpu  # noqa: F401
    if os.environ["QSHARD_UPSTREAM_FORMAT"]:
        import quantized_linears

        quantized_linears.install(
            os.environ["QSHARD_UPSTREAM_FORMAT"], os.environ["QSHARD_UPSTREAM_WEIGHTS"]
        )
