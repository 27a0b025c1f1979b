//! The scripts, and lines that an interactive bash completes on a pseudoterminal.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use super::*;

#[test]
fn scripts_contain_options_and_schemes() {
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        let text = script(shell);
        for word in ["multifd-channels", "vsock", "s3://", "qmp:"] {
            assert!(text.contains(word), "{shell}: {word}");
        }
    }
    let zsh = script(Shell::Zsh);
    for name in ["source", "old"] {
        let mut operands = zsh.lines().filter(|line| line.contains(&format!(":{name} -- ")));
        assert!(operands.any(|line| line.contains(":_towline_endpoints'")), "{name}");
    }
}

/// An interactive bash with the completions, in a directory.
struct Bash {
    child: Child,
    keys: ChildStdin,
    screen: ChildStdout,
}

impl Bash {
    fn start(directory: &Path) -> Self {
        let settings = r#"
            PS1='prompt% '
            bind 'set show-all-if-ambiguous on' 'set completion-query-items 0' 'set page-completions off'
            bind -x '"\C-xp": printf "<%s>" "$READLINE_LINE<line"'
        "#;
        std::fs::write(directory.join(".bashrc"), script(Shell::Bash) + settings).unwrap();
        // `script` runs it on a pseudoterminal. A bash that waits forever would hang the test.
        let mut child = Command::new("timeout")
            .args(["60", "script", "--quiet", "--command", "exec bash --rcfile .bashrc -i", "/dev/null"])
            .current_dir(directory)
            .env("TERM", "dumb")
            .env("INPUTRC", "/dev/null")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (keys, screen) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut bash = Self { child, keys, screen };
        // Readline has set the terminal up.
        bash.shown_before("prompt% ");
        bash
    }

    /// Returns what is written to the terminal until `end` is.
    fn shown_before(&mut self, end: &str) -> String {
        let (mut shown, mut byte) = (Vec::new(), [0]);
        while !shown.ends_with(end.as_bytes()) {
            let read = self.screen.read(&mut byte).unwrap();
            assert!(read > 0, "bash ended: {}", String::from_utf8_lossy(&shown));
            shown.push(byte[0]);
        }
        String::from_utf8_lossy(&shown[..shown.len() - end.len()]).into_owned()
    }

    /// Types a line and a tab, and returns the line that results, and the words that are listed.
    fn complete(&mut self, typed: &str) -> Completed {
        // Shows the line, and deletes it.
        self.keys.write_all(format!("{typed}\t\x18p\x15").as_bytes()).unwrap();
        let shown = self.shown_before("<line>");
        let (screen, line) = shown.rsplit_once('<').unwrap();
        let listed = screen.lines().flat_map(str::split_whitespace).map(str::to_owned).collect();
        Completed { line: line.to_owned(), listed }
    }
}

impl Drop for Bash {
    fn drop(&mut self) {
        let _ = self.keys.write_all(b"exit\n");
        let _ = self.child.wait();
    }
}

struct Completed {
    line: String,
    listed: Vec<String>,
}

/// A directory with a socket, an image and a directory.
fn guests() -> (tempfile::TempDir, UnixListener) {
    let directory = tempfile::tempdir().unwrap();
    let socket = UnixListener::bind(directory.path().join("k.qmp")).unwrap();
    for name in ["a guest.img", "guest.img"] {
        std::fs::write(directory.path().join(name), "").unwrap();
    }
    std::fs::create_dir(directory.path().join("xdir")).unwrap();
    (directory, socket)
}

#[test]
fn bash_completes_schemes_sockets_files_and_options() {
    let (directory, _socket) = guests();
    let mut bash = Bash::start(directory.path());
    for (typed, expected) in [
        // Schemes, which no space follows.
        ("copy q", "copy qmp:"),
        ("check un", "check unix:"),
        ("copy st", "copy store:"),
        ("store ls s3", "store ls s3://"),
        ("upgrade q", "upgrade qmp:"),
        // What a scheme names.
        ("copy qmp:", "copy qmp:"),
        ("copy qmp:k", "copy qmp:k.qmp "),
        ("move qmp:k.qmp unix:k", "move qmp:k.qmp unix:k.qmp "),
        ("copy qmp:g", "copy qmp:g"),
        ("copy qmp:x", "copy qmp:xdir/"),
        ("copy file:g", "copy file:guest.img "),
        ("copy s3:", "copy s3:"),
        // Files.
        ("copy g", "copy g"),
        ("copy gu", "copy guest.img "),
        ("copy a\\ g", "copy a\\ guest.img "),
        ("inspect xd", "inspect xdir/"),
        ("--log debug copy gu", "--log debug copy guest.img "),
        ("--log=towline_net=debug copy gu", "--log=towline_net=debug copy guest.img "),
        ("copy --throttle gu", "copy --throttle guest.img "),
        // `ctl`.
        ("ctl k", "ctl k.qmp "),
        ("ctl x", "ctl xdir/"),
        ("ctl qmp:k", "ctl qmp:k.qmp "),
        ("ctl k.qmp ", "ctl k.qmp "),
        ("ctl k.qmp po", "ctl k.qmp powerdown "),
        ("ctl qmp:k.qmp query-m", "ctl qmp:k.qmp query-migrate "),
        ("ctl k.qmp status ", "ctl k.qmp status "),
        ("ctl --lo", "ctl --log "),
        ("--log debug ctl k", "--log debug ctl k.qmp "),
        // Options, and commands.
        ("copy --multifd-c", "copy --multifd-channels "),
        ("copy --compression zs", "copy --compression zstd "),
        ("sto", "store "),
    ] {
        let line = bash.complete(&format!("towline {typed}")).line;
        assert_eq!(line, format!("towline {expected}"), "towline {typed}");
    }
}

#[test]
fn bash_lists_what_fits() {
    let (directory, _socket) = guests();
    let mut bash = Bash::start(directory.path());
    for (typed, expected) in [
        ("copy --resume ", &["qmp:", "s3://", "gs://", "guest.img", "--live"][..]),
        ("copy g", &["gs://", "guest.img"]),
        ("ctl ", &["k.qmp", "xdir/"]),
        ("ctl k.qmp ", &["status", "powerdown", "query-migrate"]),
    ] {
        let listed = bash.complete(&format!("towline {typed}")).listed;
        let missing: Vec<_> =
            expected.iter().filter(|word| !listed.iter().any(|found| found == *word)).collect();
        assert!(missing.is_empty(), "towline {typed}: {missing:?} of {listed:?}");
        assert!(!listed.iter().any(|word| word.starts_with('<')), "{listed:?}");
    }
}
