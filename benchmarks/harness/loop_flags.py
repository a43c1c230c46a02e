"""The flags of the reference loops."""

import argparse


def loop_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The flags that the loops have in common with the trainers, and --steps."""
    parser = argparse.ArgumentParser(
        prog=f"python benchmarks/{name}.py",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--arch", default="resnet50", help="a classification model of torchvision")
    add("--train-crop-size", type=int, default=224, help="side of the images, pixels")
    add("--batch-size", type=int, default=32, help="images a step and rank")
    add("--threads", type=int, help="CPU threads (default: torch's)")
    add("--steps", type=int, help="end after so many (default: never)")
    return parser
