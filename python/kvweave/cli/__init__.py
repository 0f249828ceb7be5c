"""The `kvweave` command: demo, generate, plan, capacity, eval, bench. One file a command.

Frameworks are imported inside the commands, so that help and bad input answer at once.
"""

import typer

from kvweave.cli import bench
from kvweave.cli.capacity import capacity
from kvweave.cli.demo import demo
from kvweave.cli.evaluate import evaluate
from kvweave.cli.generate import generate
from kvweave.cli.plan import plan

app = typer.Typer(
    name="kvweave",
    help="Reuse a document's KV anywhere in a prompt.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(demo)
app.command("generate")(generate)
app.command("plan")(plan)
app.command("capacity")(capacity)
app.command("eval")(evaluate)
app.add_typer(bench.app)


def main() -> None:
    """Entry point of the console script."""
    app()
