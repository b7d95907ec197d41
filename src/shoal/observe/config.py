"""The table `[observe]` of the run file. Imports no torch: a bad key is refused early."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from shoal.config.check import Positive, Table, says


class ObserveConfig(Table, frozen=True):
    """What is measured, how often, and who is shown it."""

    evaluate_every_steps: Annotated[int, says("Steps between two evaluations; 0: only at the end.", ge=0)] = 0
    evaluate_samples: Annotated[Positive | None, says("Held-out samples of one evaluation; default: all of them.")] = (
        None
    )
    sample_bytes: Annotated[
        int, says("Bytes of text drawn from a byte-level language model at the end; 0: none.", ge=0, le=1 << 20)
    ] = 0
    sample_prompt: Annotated[str, says("Text that the drawn text continues.", min_length=1)] = "def "
    live: Annotated[bool, says("Show a live line where the output is a terminal; else plain lines.")] = True
    compare_every_steps: Annotated[
        Annotated[int, msgspec.Meta(ge=0)] | None,
        says(
            "Steps between two comparisons of the copies of the weights and the optimizer's state that ranks hold; "
            "default: after steps 2 and 10, every 100 steps, and before every save and evaluation; 0: never, not at "
            "the start either."
        ),
    ] = None
    expert_loads_every_steps: Annotated[
        int, says("Steps between two records of the load of every expert of a mixture; 0: none.", ge=0)
    ] = 10
    noise_every_steps: Annotated[
        int, says("Steps between two measurements of the gradient noise scale (arXiv:1812.06162); 0: none.", ge=0)
    ] = 0
    noise_by_layer: Annotated[
        bool, says("Whether the noise scale is also measured layer by layer, in the same steps.")
    ] = False
    layer_norms_every_steps: Annotated[
        int, says("Steps between two measurements of the gradient's norm layer by layer; 0: none.", ge=0)
    ] = 0
    straggler_factor: Annotated[
        float, says("Times as long as the others' for a sample after which a replica is named as slow.", gt=1, le=100)
    ] = 1.2
    straggler_steps: Annotated[
        int, says("Steps over which it has to be; fewer than 16 confuse noise with slowness.", ge=8, le=1024)
    ] = 16
    straggler_s: Annotated[
        float, says("Seconds without a break for which it has to be, until a warning names it, once.", ge=0)
    ] = 120.0
    one_rank: Annotated[
        str | None,
        says("Directory of a run of the same model on one rank: speed-up and efficiency against it are measured."),
    ] = None
    peak_tflops: Annotated[
        Annotated[float, msgspec.Meta(gt=0)] | None,
        says(
            "What a device could compute, in TFLOP/s at this run's precision: MFU and HFU are shares of it. Default: "
            "the data sheet's, of GPUs that are known by name."
        ),
    ] = None
    page: Annotated[
        bool, says("Serve the live page on loopback while `shoal train` runs its own ranks (extra `page`).")
    ] = False
    page_port: Annotated[int, says("Port of that page, 0: any that is free.", ge=0, le=65535)] = 0
    report: Annotated[bool, says("Write `report.html` at the end; `shoal report` draws `loss.png` besides.")] = True
    webhook: Annotated[
        str | None, says("URL that gets every warning, and an end without success, as a POST of JSON.")
    ] = None
    prometheus_port: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=65535)] | None,
        says("Port of the host's endpoint for Prometheus, 0: any that is free (extra `prometheus`)."),
    ] = None
    prometheus_host: Annotated[str, says("Address of that endpoint; 0.0.0.0: reachable from other hosts.")] = (
        "127.0.0.1"
    )
    tensorboard: Annotated[bool, says("Write `tensorboard/` in the run directory (extra `tensorboard`).")] = False
    mlflow: Annotated[
        str | None,
        says("Tracking URI of MLflow, such as `http://host:5000` or `sqlite:///mlflow.db` (extra `mlflow`)."),
    ] = None
    wandb: Annotated[
        Literal["off", "offline", "online"],
        says("Weights & Biases; offline: files in the run directory for `wandb sync` (extra `wandb`)."),
    ] = "off"

    def __post_init__(self) -> None:
        if self.webhook is not None:
            require_webhook_url(self.webhook)


def require_webhook_url(url: str) -> None:
    """Raises `ValueError` where `url` is none to which alerts can be sent."""
    user = False
    try:
        parts = urlsplit(url)
        user = "@" in parts.netloc
        named = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not match, a port that is no number
        named = False
    if not named or any(character <= " " or character == "\x7f" for character in url):
        raise ValueError(f"webhook = {url!r}: write an http:// or https:// URL")
    if user:
        raise ValueError("webhook has a user name in front of its host, which is not sent: write the URL without it")
