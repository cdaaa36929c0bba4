"""`linattn completion`: the script that lets a shell complete commands, options and their values."""

from __future__ import annotations

from typing import Annotated

import typer

from linattn_cli import output
from linattn_cli.completions import choices
from linattn_cli.options import DebugOption, FormatOption, JsonOption, QuietOption

# The variables are those that typer's completion reads.
SCRIPTS = {
    "bash": r"""_linattn_completion() {
    local IFS=$'\n'
    COMPREPLY=( $( env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD _LINATTN_COMPLETE=complete_bash "$1" 2>/dev/null ) )
    # a key of --set goes on with its value
    [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace 2>/dev/null
    return 0
}
complete -o default -F _linattn_completion linattn
""",  # noqa: E501 - the shell reads these lines as they are
    "zsh": r"""#compdef linattn
_linattn_completion() {
    eval $(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" _LINATTN_COMPLETE=complete_zsh linattn 2>/dev/null)
}
compdef _linattn_completion linattn
""",
    "fish": r"""function _linattn_completion
    env _LINATTN_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=$argv[1] _TYPER_COMPLETE_ARGS=(commandline -cp) linattn 2>/dev/null
end
complete --command linattn --no-files --arguments "(_linattn_completion get-args)" --condition "_linattn_completion is-args"
""",  # noqa: E501 - the shell reads these lines as they are
}

STARTUP = {
    "bash": "echo 'eval \"$(linattn completion bash)\"' >> ~/.bashrc",
    "zsh": "echo 'eval \"$(linattn completion zsh)\"' >> ~/.zshrc, below the line with compinit",
    "fish": "linattn completion fish > ~/.config/fish/completions/linattn.fish",
}


def completion(
    shell: Annotated[
        str,
        typer.Argument(metavar="[bash|zsh|fish]", help="Which shell.", autocompletion=choices(*SCRIPTS)),
    ],
    fmt: FormatOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Print the script that completes commands, options, models, tasks, recipes and runs at TAB.

    Example: eval "$(linattn completion bash)"

    For every new shell, add that line to ~/.bashrc or ~/.zshrc; for fish, save the output as
    ~/.config/fish/completions/linattn.fish.
    """
    with output.command("completion", fmt=fmt, json=json, quiet=quiet, debug=debug) as doc:
        if shell not in SCRIPTS:
            from linattn_cli.recipe import nearest

            raise output.CliError(
                f"there is no completion for {shell!r}{nearest(shell, SCRIPTS)}", hint=f"there are {', '.join(SCRIPTS)}"
            )
        doc.results = [{"shell": shell, "script": SCRIPTS[shell]}]
        doc.text = SCRIPTS[shell]
        doc.note(f"for every new shell: {STARTUP[shell]}")
