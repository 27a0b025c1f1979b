//! Shell completions: clap's, and the schemes and sockets of endpoints, which clap does not know.

use std::collections::BTreeSet;

use clap::CommandFactory as _;
use clap_complete::Shell;

use crate::args::Args;

/// Schemes of endpoints, as completed.
const SCHEMES: &str = "qmp: tcp: unix: ws:// wss:// fd: exec: file: s3:// gs:// az:// store: mem: null:";
/// Commands with endpoints.
const ENDPOINT_COMMANDS: &str = "copy move check inspect store run repair";

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

/// Bash splits words at colons, so that the part behind a scheme is a word of its own.
fn bash() -> String {
    let mut command = Args::command();
    command.build();
    let mut options = BTreeSet::new();
    value_options(&command, &mut options);
    let options: Vec<String> = options.into_iter().collect();
    BASH.replace("SCHEMES", SCHEMES)
        .replace("ENDPOINT_COMMANDS", &ENDPOINT_COMMANDS.replace(' ', "|"))
        .replace("VALUE_OPTIONS", &options.join("|"))
}

/// Collects the options with values of a command and of all of its commands.
fn value_options(command: &clap::Command, options: &mut BTreeSet<String>) {
    let with_value = command.get_arguments().filter(|option| option.get_action().takes_values());
    options.extend(with_value.filter_map(|option| Some(format!("--{}", option.get_long()?))));
    command.get_subcommands().for_each(|below| value_options(below, options));
}

const BASH: &str = r#"
_towline_sockets() {
    local path
    while IFS= read -r path; do
        if [[ -S $path ]]; then
            COMPREPLY+=("$path")
        elif [[ -d $path ]]; then
            COMPREPLY+=("$path/")
        fi
    done < <(compgen -f -- "$1")
}

_towline_endpoints() {
    local cur="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"
    local command="${COMP_WORDS[1]}"
    if [[ $cur == : ]]; then
        previous=:
        cur=
    fi
    if [[ $previous == : ]]; then
        COMPREPLY=()
        compopt -o nospace -o filenames
        case "${COMP_WORDS[COMP_CWORD-1]/:/${COMP_WORDS[COMP_CWORD-2]}}" in
            qmp|unix|ctl) _towline_sockets "$cur" ;;
            *) mapfile -t COMPREPLY < <(compgen -f -- "$cur") ;;
        esac
        return
    fi
    if [[ $command == ctl && COMP_CWORD -eq 2 ]]; then
        COMPREPLY=()
        compopt -o nospace -o filenames
        _towline_sockets "$cur"
        return
    fi
    _towline "$@"
    case "$previous" in
        VALUE_OPTIONS) return ;;
    esac
    local index
    for index in "${!COMPREPLY[@]}"; do
        # Names of arguments.
        [[ ${COMPREPLY[index]} == [\<\[]* ]] && unset "COMPREPLY[index]"
    done
    case "$command" in
        ENDPOINT_COMMANDS)
            if [[ $cur != -* && COMP_CWORD -gt 1 ]]; then
                local words
                mapfile -t words < <(compgen -W "SCHEMES" -- "$cur")
                COMPREPLY+=("${words[@]}")
                mapfile -t words < <(compgen -f -- "$cur")
                COMPREPLY+=("${words[@]}")
                compopt -o nospace -o filenames
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
        let is_endpoint =
            ["source -- ", "destination -- ", "destinations -- ", "place -- ", "image -- ", "images -- "]
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
mod tests {
    use std::os::unix::net::UnixListener;
    use std::process::Command;

    use super::*;

    #[test]
    fn scripts_contain_options_and_schemes() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let text = script(shell);
            for word in ["multifd-channels", "vsock", "s3://", "qmp:"] {
                assert!(text.contains(word), "{shell}: {word}");
            }
        }
        assert!(script(Shell::Zsh).contains(":_towline_endpoints'"));
    }

    /// Completes a line in bash, and returns the sorted replies.
    fn completed(directory: &std::path::Path, words: &[&str]) -> Vec<String> {
        std::fs::write(directory.join("completions"), script(Shell::Bash)).unwrap();
        let quoted: Vec<String> = words.iter().map(|word| format!("'{word}'")).collect();
        // `compopt` works only within a completion.
        let line = format!(
            "compopt() {{ :; }}; source ./completions; COMP_WORDS=({}); COMP_CWORD={}; \
             _towline_endpoints towline '{}' '{}'; printf '%s\\n' \"${{COMPREPLY[@]}}\"",
            quoted.join(" "),
            words.len() - 1,
            words[words.len() - 1],
            words[words.len() - 2]
        );
        let output = Command::new("bash").args(["-c", &line]).current_dir(directory).output().unwrap();
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        let mut replies: Vec<String> =
            String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect();
        replies.sort();
        replies
    }

    #[test]
    fn bash_completes_schemes_sockets_and_options() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let _socket = UnixListener::bind(path.join("k.qmp")).unwrap();
        std::fs::write(path.join("k.img"), "").unwrap();
        assert_eq!(completed(path, &["towline", "copy", "qm"]), ["qmp:"]);
        assert_eq!(completed(path, &["towline", "copy", "k"]), ["k.img", "k.qmp"]);
        assert_eq!(completed(path, &["towline", "copy", "qmp", ":", "k"]), ["k.qmp"]);
        assert_eq!(completed(path, &["towline", "copy", "file", ":", "k"]), ["k.img", "k.qmp"]);
        assert_eq!(completed(path, &["towline", "ctl", "k"]), ["k.qmp"]);
        assert_eq!(completed(path, &["towline", "copy", "--multifd-c"]), ["--multifd-channels"]);
        assert_eq!(completed(path, &["towline", "copy", "--compression", "z"]), ["zlib", "zstd"]);
        assert_eq!(completed(path, &["towline", "sto"]), ["store"]);
        let after_flag = completed(path, &["towline", "copy", "--resume", ""]);
        assert!(["qmp:", "k.img", "--live"].iter().all(|word| after_flag.contains(&(*word).to_owned())));
        assert!(!after_flag.iter().any(|word| word.starts_with('<')), "{after_flag:?}");
    }
}
