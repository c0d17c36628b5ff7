"""Completion scripts for bash, zsh and fish, made from the command tree.

The scripts are whole: a TAB starts no Python (a program that answered itself would take 0.2 s for each) and opens no
socket. What they ask the machine for is files, and the names of nodes, by looking at the directories of sockets.
`make install` puts them where the shells look; `pdd completion SHELL` prints one.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator
from typing import Any, Literal

import typer.main

Kind = Literal["none", "any", "file", "dir", "node", "words"]  # what follows an option, or stands as an argument

_KINDS: dict[str, Kind] = {"FILE": "file", "PATH": "file", "SOURCE": "file", "DIR": "dir"}
# (command, option or metavar of an argument) → its words. The command tree has them in the text of its help alone.
WORDS = {
    ("", "--color"): "auto always never",
    ("serve", "--role"): "prefill decode both",
    ("status", "--wait"): "ready drained",
    ("requests", "ACTION"): "ls show cancel",
    ("topology", "ACTION"): "show check",
    ("topology", "--format"): "tree matrix json nccl-xml dot",
    ("top", "--tab"): "overview transfers requests topology logs",
    ("events", "--topic"): "status transfers requests peers topology logs",
    ("logs", "--level"): "debug info warning error",
    ("bench kv", "--layout"): "scattered adjacent",
    ("bench kv", "--provider"): "auto efa verbs tcp local",
    ("completion", "SHELL"): "bash zsh fish",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    names: tuple[str, ...]
    help: str
    kind: Kind
    words: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    path: str  # "" for what stands before any command
    help: str
    options: tuple[Option, ...]
    arguments: tuple[tuple[Kind, str], ...]  # and their words
    children: tuple[tuple[str, str], ...]  # name, help


def commands() -> list[Command]:
    """The tree, from the root on."""
    from pdd.commands.tree import program

    return list(_walk(typer.main.get_command(program.app), ""))


def _walk(command: Any, path: str) -> Iterator[Command]:
    options, arguments = [Option(("-h", "--help"), "Print help.", "none")], []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            arguments.append(_value(path, parameter.metavar, parameter.metavar))
        else:
            names = (*parameter.opts, *parameter.secondary_opts)
            kind, words = _value(path, names[-1], parameter.metavar or "")
            options.append(Option(names, _line(parameter.help), "none" if parameter.is_flag else kind, words))
    children = getattr(command, "commands", {})
    yield Command(path, _line(command.help), tuple(options), tuple(arguments),
                  tuple((name, _line(child.help)) for name, child in children.items()))  # fmt: skip
    for name, child in children.items():
        yield from _walk(child, f"{path} {name}".strip())


def _value(path: str, name: str, metavar: str) -> tuple[Kind, str]:
    if (path, name) in WORDS:
        return "words", WORDS[path, name]
    if name == "--instance":
        return "node", ""
    return _KINDS.get(metavar, "any"), ""


def _line(text: str | None) -> str:
    return (text or "").split("\n")[0]


def script(shell: str) -> str:
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands())


# -- bash, and the part of zsh that is the same ------------------------------------------------------------------------
_NODES = """_pdd_nodes() {
  local at
  for at in /run/pdd/*/status.sock "${XDG_RUNTIME_DIR:-/nonexistent}"/pdd/*/status.sock; do
    [ -e "$at" ] && at=${at%/*} && printf '%s\\n' "${at##*/}"
  done
}
"""


def _takes_value(all_commands: list[Command]) -> str:
    """A pattern of the options after which a value stands; an option means the same in every command that has it."""
    names = sorted({name for each in all_commands for option in each.options if option.kind != "none" for name in option.names})
    return "|".join(names)


def _paths(all_commands: list[Command]) -> str:
    return "|".join(shlex.quote(each.path) for each in all_commands if each.path)


def _values_by_option(all_commands: list[Command]) -> Iterator[tuple[str, Option]]:
    """A pattern for "COMMAND:OPTION" → the option, the global ones for all commands."""
    for each in all_commands:
        for option in each.options:
            if option.kind not in ("none", "any"):
                place = shlex.quote(each.path) if each.path else "*"
                yield "|".join(f"{place}:{name}" for name in option.names), option


def _bash(all_commands: list[Command]) -> str:
    root = all_commands[0]
    reply = {"file": "compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- \"$cur\")",
             "dir": "compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- \"$cur\")",
             "node": "_pdd_reply \"$(_pdd_nodes)\"", "any": ":", "none": ":"}  # fmt: skip

    def answer(kind: Kind, words: str) -> str:
        return f'_pdd_reply "{words}"' if kind == "words" else reply[kind]

    lines = [f"# bash completion of pdd: made by `pdd completion bash`.\n{_NODES}",
             "_pdd_reply() { mapfile -t COMPREPLY < <(compgen -W \"$1\" -- \"$cur\"); }\n",
             "_pdd() {", "  local cur=${COMP_WORDS[COMP_CWORD]} option= path= word skip= i options",
             "  COMPREPLY=()",
             "  for ((i = 1; i < COMP_CWORD; i++)); do  # `=` is a word of its own here",
             "    word=${COMP_WORDS[i]}",
             "    if [ \"$word\" = = ]; then skip=1; continue; fi",
             "    if [ -n \"$skip\" ]; then skip=; option=; continue; fi",
             "    option=",
             f"    case $word in {_takes_value(all_commands)}) option=$word skip=1; continue ;; esac",
             f"    case \"${{path:+$path }}$word\" in {_paths(all_commands)}) path=\"${{path:+$path }}$word\" ;; esac",
             "  done",
             "  if [ \"$cur\" = = ]; then cur=; fi",
             "  if [ -n \"$option\" ]; then", "    case \"$path:$option\" in"]  # fmt: skip
    lines += [f"      {pattern}) {answer(option.kind, option.words)} ;;" for pattern, option in _values_by_option(all_commands)]
    lines += ["    esac", "    return", "  fi", f"  options=\"{_names(root)}\"", "  case $path in"]
    for each in all_commands:
        lines += [f"    {shlex.quote(each.path)})", f"      options+=\" {_names(each)}\"" if each.path else "      :"]
        if each.children:
            lines.append(f"      [[ $cur == -* ]] || _pdd_reply \"{' '.join(name for name, _ in each.children)}\"")
        elif each.arguments:
            lines.append(f"      [[ $cur == -* ]] || {{ {answer(*each.arguments[0])}; }}")
        lines.append("      ;;")
    lines += ["  esac", "  if [[ $cur == -* ]]; then _pdd_reply \"$options\"; fi", "}", "complete -F _pdd pdd"]
    return "\n".join(lines) + "\n"


def _names(command: Command) -> str:
    return " ".join(name for option in command.options for name in option.names)


# -- zsh ---------------------------------------------------------------------------------------------------------------
def _zsh(all_commands: list[Command]) -> str:
    reply = {"file": "_files", "dir": "_files -/", "node": "compadd -- ${(f)\"$(_pdd_nodes)\"}", "any": ":", "none": ":"}

    def answer(kind: Kind, words: str) -> str:
        return f"compadd -- {words}" if kind == "words" else reply[kind]

    def described(pairs: list[tuple[str, str]]) -> str:
        return " ".join(shlex.quote(f"{name}:{text}") for name, text in pairs)

    def option_lines(command: Command) -> str:
        return described([(name, option.help) for option in command.options for name in option.names])

    lines = [f"#compdef pdd\n# zsh completion of pdd: made by `pdd completion zsh`.\n{_NODES}",
             "_pdd() {", "  local cur=$words[CURRENT] option= cmd= word skip= i",
             "  local -a options children",
             "  for ((i = 2; i < CURRENT; i++)); do",
             "    word=$words[i]",
             "    if [ -n \"$skip\" ]; then skip=; option=; continue; fi",
             "    option=",
             f"    case $word in ({_takes_value(all_commands)}) option=$word skip=1; continue ;; esac",
             f"    case \"${{cmd:+$cmd }}$word\" in ({_paths(all_commands)}) cmd=\"${{cmd:+$cmd }}$word\" ;; esac",
             "  done",
             "  if [[ $cur == --*=* ]]; then option=${cur%%=*}; compset -P '*='; fi",
             "  if [ -n \"$option\" ]; then", "    case \"$cmd:$option\" in"]  # fmt: skip
    lines += [f"      ({places}) {answer(option.kind, option.words)} ;;" for places, option in _values_by_option(all_commands)]
    lines += ["    esac", "    return", "  fi", f"  options=({option_lines(all_commands[0])})", "  case $cmd in"]
    for each in all_commands:
        lines += [f"    ({shlex.quote(each.path)})", f"      options+=({option_lines(each)})" if each.path else "      :"]
        if each.children:
            lines.append(f"      children=({described(list(each.children))})")
            lines.append("      [[ $cur == -* ]] || _describe command children")
        elif each.arguments:
            lines.append(f"      [[ $cur == -* ]] || {answer(*each.arguments[0])}")
        lines.append("      ;;")
    lines += ["  esac", "  if [[ $cur == -* ]]; then _describe -o option options; fi", "}",
              "if [ \"$funcstack[1]\" = _pdd ]; then _pdd \"$@\"; else compdef _pdd pdd; fi"]  # fmt: skip
    return "\n".join(lines) + "\n"


# -- fish --------------------------------------------------------------------------------------------------------------
def _fish(all_commands: list[Command]) -> str:
    directories, nodes = "-xa '(__fish_complete_directories)'", "-xa '(__pdd_nodes)'"
    values = {"file": "-rF", "dir": directories, "node": nodes, "any": "-x", "none": ""}

    def answer(kind: Kind, words: str) -> str:
        return f"-xa '{words}'" if kind == "words" else values[kind]

    takes = " ".join(_takes_value(all_commands).split("|"))
    paths = " ".join(_paths(all_commands).split("|"))
    lines = [f"""# fish completion of pdd: made by `pdd completion fish`.
function __pdd_nodes
  for at in /run/pdd/*/status.sock $XDG_RUNTIME_DIR/pdd/*/status.sock
    basename (dirname $at)
  end
end
function __pdd_at  # whether the command so far is $argv
  set -l path; set -l skip 0
  for word in (commandline -opc)[2..-1]
    if test $skip = 1; set skip 0; continue; end
    if contains -- $word {takes}; set skip 1; continue; end
    if contains -- (string join ' ' $path $word) {paths}; set path $path $word; end
  end
  test "$argv" = "$path"
end
complete -c pdd -f"""]
    for each in all_commands:
        at = f"-n '__pdd_at {each.path}'"
        for option in each.options:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
            where = at if each.path or "--help" in option.names else ""  # the global options stand anywhere
            lines.append(" ".join(filter(None, ["complete -c pdd", where, names, answer(option.kind, option.words),
                                                f"-d {_fish_quote(option.help)}"])))  # fmt: skip
        lines += [f"complete -c pdd {at} -xa {name} -d {_fish_quote(text)}" for name, text in each.children]
        if each.arguments and each.arguments[0][0] not in ("any", "none"):
            kind, words = each.arguments[0]
            lines.append(f"complete -c pdd {at} {'-F' if kind == 'file' else answer(kind, words)}")
    return "\n".join(lines) + "\n"


def _fish_quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
