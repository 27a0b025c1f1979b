//! Shell completions: clap's, and the schemes and sockets of endpoints, which clap does not know.

use std::collections::BTreeSet;

use clap::CommandFactory as _;
use clap_complete::Shell;

use crate::args::Args;

/// Schemes of endpoints, as completed.
const SCHEMES: &str = "qmp: tcp: unix: ws:// wss:// fd: exec: file: s3:// gs:// az:// store: mem: null:";
/// Commands with endpoints.
const ENDPOINT_COMMANDS: &str = "copy move check inspect store run repair upgrade";
/// Commands of QMP that `ctl` completes: those of guests, and of a copy.
const QMP_COMMANDS: &str = "status powerdown reset quit cont stop query-migrate migrate_cancel";

/// Returns the script of a shell.
pub(super) fn script(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "towline", &mut script);
    let script = String::from_utf8_lossy(&script).into_owned();
    match shell {
        Shell::Bash => script + &bash(),
        Shell::Fish => script + &fish(),
        Shell::Zsh => zsh(&script),
        _ => script,
    }
}

/// Bash splits words at colons, so the part after a scheme is a separate word.
fn bash() -> String {
    let mut command = Args::command();
    command.build();
    let mut options = BTreeSet::new();
    value_options(&command, &mut options);
    let options: Vec<String> = options.into_iter().collect();
    BASH.replace("SCHEMES", SCHEMES)
        .replace("ENDPOINT_COMMANDS", &ENDPOINT_COMMANDS.replace(' ', "|"))
        .replace("QMP_COMMANDS", QMP_COMMANDS)
        .replace("VALUE_OPTIONS", &options.join("|"))
}

/// Collects the options of a command and of all of its commands that are followed by a value.
fn value_options(command: &clap::Command, options: &mut BTreeSet<String>) {
    let with_value = command
        .get_arguments()
        .filter(|option| option.get_action().takes_values() && !option.is_require_equals_set());
    options.extend(with_value.filter_map(|option| Some(format!("--{}", option.get_long()?))));
    command.get_subcommands().for_each(|below| value_options(below, options));
}

const BASH: &str = r#"
_towline_files() {
    mapfile -t COMPREPLY < <(compgen -f -- "$1")
    compopt -o filenames
}

_towline_sockets() {
    local path
    COMPREPLY=()
    while IFS= read -r path; do
        [[ -S $path || -d $path ]] && COMPREPLY+=("$path")
    done < <(compgen -f -- "$1")
    compopt -o filenames
}

# The words before the one at the cursor: `command`, and the number of its operands.
_towline_words() {
    local index
    command=
    operands=0
    for (( index = 1; index < COMP_CWORD; index++ )); do
        case "${COMP_WORDS[index]}" in
            # The word behind belongs to the one before.
            :|=) (( index += 1 )) ;;
            VALUE_OPTIONS) [[ ${COMP_WORDS[index+1]} == = ]] || (( index += 1 )) ;;
            -*) ;;
            *)
                if [[ $command ]]; then
                    (( operands += 1 ))
                else
                    command="${COMP_WORDS[index]}"
                fi
                ;;
        esac
    done
}

_towline_endpoints() {
    local cur="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"
    local command operands
    if [[ $cur == : ]]; then
        previous=:
        cur=
    fi
    if [[ $previous == : ]]; then
        COMPREPLY=()
        case "${COMP_WORDS[COMP_CWORD-1]/:/${COMP_WORDS[COMP_CWORD-2]}}" in
            qmp|unix|ctl) _towline_sockets "$cur" ;;
            file|store|exec) _towline_files "$cur" ;;
        esac
        return
    fi
    _towline_words
    _towline "$@"
    case "$previous" in
        VALUE_OPTIONS) return ;;
    esac
    local index
    for index in "${!COMPREPLY[@]}"; do
        # Names of arguments.
        [[ ${COMPREPLY[index]} == [\<\[]* ]] && unset "COMPREPLY[index]"
    done
    [[ $cur == -* ]] && return
    case "$command" in
        ctl)
            case "$operands" in
                0) _towline_sockets "$cur" ;;
                1) mapfile -t COMPREPLY < <(compgen -W "QMP_COMMANDS" -- "$cur") ;;
                *) COMPREPLY=() ;;
            esac
            ;;
        ENDPOINT_COMMANDS)
            local schemes files
            mapfile -t schemes < <(compgen -W "SCHEMES" -- "$cur")
            mapfile -t files < <(compgen -f -- "$cur")
            COMPREPLY+=("${schemes[@]}" "${files[@]}")
            if (( ${#schemes[@]} )); then
                # As file names their colons would be quoted.
                compopt -o nospace
            elif (( ${#files[@]} )); then
                compopt -o filenames
            fi
            ;;
    esac
}

complete -F _towline_endpoints -o nosort -o bashdefault towline
"#;

fn fish() -> String {
    let schemes: Vec<String> = SCHEMES.split(' ').map(|scheme| format!("'{scheme}'")).collect();
    format!(
        "\nfunction __fish_towline_endpoints\n    printf '%s\\n' {}\n    __fish_complete_suffix .sock .qmp .img\nend\n\
         complete -c towline -n '__fish_seen_subcommand_from {ENDPOINT_COMMANDS}' -a '(__fish_towline_endpoints)'\n",
        schemes.join(" ")
    )
}

/// Positional arguments that clap completes as any text become endpoints.
fn zsh(script: &str) -> String {
    let mut text = String::new();
    for line in script.lines() {
        let is_endpoint = [
            "source -- ",
            "destination -- ",
            "destinations -- ",
            "place -- ",
            "image -- ",
            "images -- ",
            "old -- ",
        ]
        .iter()
        .any(|name| line.contains(&format!(":{name}")));
        if is_endpoint {
            text += &line.replace(":_default'", ":_towline_endpoints'");
        } else {
            text += line;
        }
        text.push('\n');
    }
    let schemes: Vec<&str> = SCHEMES.split(' ').collect();
    let function = format!(
        "_towline_endpoints() {{\n    if compset -P '(qmp|unix|ctl):'; then\n        _files -g '*(=,/)'\n        return\n    fi\n\
         \x20   compset -P '(file|store|exec):' && {{ _files; return }}\n    compadd -S '' -- {}\n    _files\n}}\n\n",
        schemes.join(" ")
    );
    // Before the script's own functions, of which the first is called when the file is loaded.
    match text.split_once("\n\n") {
        Some((head, rest)) => format!("{head}\n\n{function}{rest}"),
        None => text + &function,
    }
}

#[cfg(test)]
mod tests;
