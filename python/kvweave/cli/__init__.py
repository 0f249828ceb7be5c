"""The `kvweave` command and all that stands behind it: see `kvweave --help`.

Frameworks are imported inside the commands, so that help and bad input answer at once.
"""

from typing import Annotated

import typer

from kvweave.cli import bench, store
from kvweave.cli.capacity import capacity
from kvweave.cli.certify import certify
from kvweave.cli.demo import demo
from kvweave.cli.doctor import doctor
from kvweave.cli.evaluate import evaluate
from kvweave.cli.generate import generate
from kvweave.cli.plan import plan
from kvweave.cli.profile_heads import profile_heads
from kvweave.cli.report import report
from kvweave.cli.stats import stats
from kvweave.cli.vllm_config import vllm_config

app = typer.Typer(
    name="kvweave",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from kvweave import __version__, cuda_status

        typer.echo(f"kvweave {__version__}, CUDA {cuda_status()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_version,
            is_eager=True,
            help="Say which, and whether CUDA can be used.",
        ),
    ] = False,
) -> None:
    """Reuse a document's KV anywhere in a prompt."""


app.command("demo")(demo)
app.command("generate")(generate)
app.command("plan")(plan)
app.command("capacity")(capacity)
app.command("eval")(evaluate)
app.command("report")(report)
app.command("certify")(certify)
app.command("profile-heads")(profile_heads)
app.command("vllm-config")(vllm_config)
app.command("doctor")(doctor)
app.command("stats")(stats)
app.add_typer(bench.app)
app.add_typer(store.app)


def main() -> None:
    """Entry point of the console script."""
    app()
