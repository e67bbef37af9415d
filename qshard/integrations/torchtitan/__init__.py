"""torchtitan with quantized weights, for the version that is installed.

torchtitan 0.2, whose converters change a model and whose configuration is TOML:

    [job]
    custom_config_module = "qshard.integrations.torchtitan"    # imports this file, adds the section below
    [model]
    converters = ["quantize.qshard"]
    [quantize.qshard]
    recipe = "float8_blockwise"

torchtitan 0.3, whose converters change a model's configuration, which is Python:

    model_spec = model_registry("8B", converters=[QShardConverter.Config(recipe="float8_blockwise")])
    model_spec.parallelize_fn = qshard_parallelize(model_spec.parallelize_fn)
"""

import importlib.util

# The versions are told apart by what they have, since pre-releases and builds from source name none.
if importlib.util.find_spec("torchtitan.config.job_config") is not None:
    from qshard.integrations.torchtitan.converter import (
        JobConfig as JobConfig,
        QShard as QShard,
        QShardConverter as QShardConverter,
        Quantize as Quantize,
    )
elif importlib.util.find_spec("torchtitan.config.configurable") is not None:
    from qshard.integrations.torchtitan.config_converter import (
        QShardConverter as QShardConverter,
        qshard_parallelize as qshard_parallelize,
    )
else:
    raise ImportError(
        "qshard.integrations.torchtitan: this torchtitan has neither torchtitan.config.job_config, as 0.2, "
        "nor torchtitan.config.configurable, as 0.3; call qshard.quantize_(model, recipe, "
        "persistent_state=False) after its parallelize function"
    )
