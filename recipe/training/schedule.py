"""The learning rate at any point of training, a function of the samples seen."""

import math

from recipe.config import Config


def learning_rate(config: Config, epoch: float, scale: float) -> float:
    """Learning rate at fractional `epoch` (samples seen / training images).

    `scale` is what one worker's --base-lr is multiplied by, by the linear scaling rule of Goyal et
    al. 2017 (arXiv 1706.02677, section 2.1). Their warm-up is gradual-256: from 0.1, the rate of 8
    workers of 32 images, to 3.2 with 256 (section 5.2). The cosine comes down over the epochs
    after warm-up, as in torchvision's reference, or from one restart to the next (Loshchilov and
    Hutter 2017, arXiv 1608.03983, equation 5). While the batch grows, the rate grows with it, which
    keeps the noise of the gradients as it is (Smith et al. 2018, arXiv 1711.00489).
    """
    base_lr = config.base_lr * config.batch_share(epoch)
    peak = base_lr * scale
    if epoch < config.warmup_epochs:
        starts = {
            "gradual": base_lr * min(scale, 1.0),
            "gradual-256": min(config.base_lr * 256 / config.batch_size, peak),
            "linear": 0.01 * peak,
        }
        start = starts[config.warmup_method]
        return start + (peak - start) * epoch / config.warmup_epochs
    if config.lr_scheduler == "step":
        return peak * config.lr_gamma ** sum(epoch >= step for step in config.lr_step_epochs)
    restarts = config.lr_restart_epochs if config.lr_scheduler == "cosine" else ()
    begin = max([config.warmup_epochs, *(turn for turn in restarts if turn <= epoch)])
    end = min([config.epochs, *(turn for turn in restarts if turn > epoch)])
    progress = min(1.0, (epoch - begin) / max(end - begin, 1e-9))
    if config.lr_scheduler == "linear":
        return config.lr_min + (peak - config.lr_min) * (1 - progress)
    return config.lr_min + (peak - config.lr_min) * 0.5 * (1 + math.cos(math.pi * progress))
