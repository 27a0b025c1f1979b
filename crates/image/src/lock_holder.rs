//! The process that has a file locked, for error messages, if `/proc` shows it.

use std::fs::File;

use rustix::fs::{fstat, major, minor};

/// Length of a command line in an error.
const COMMAND_CHARS_MAX: usize = 120;

/// The process that holds a `flock` on `file`, with its command line, for messages.
#[must_use]
pub fn lock_holder(file: &File) -> String {
    let locks = std::fs::read_to_string("/proc/locks").unwrap_or_default();
    let ours = fstat(file)
        .map(|stat| format!("{:02x}:{:02x}:{}", major(stat.st_dev), minor(stat.st_dev), stat.st_ino));
    let pid = ours.ok().and_then(|ours| locks.lines().find_map(|line| pid_of(line, &ours)));
    pid.map_or_else(|| "another process".into(), process_text)
}

/// A process with its command line.
pub(crate) fn process_text(pid: u32) -> String {
    match command_line(pid) {
        Some(command) => format!("process {pid} ({command})"),
        None => format!("process {pid}"),
    }
}

/// The process of a line of `/proc/locks` if it is a `flock` of this file: `1: FLOCK  ADVISORY  READ  4711
/// fe:01:131073 0 EOF`. 0 is a process outside of our PID namespace.
fn pid_of(line: &str, file: &str) -> Option<u32> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let (kind, mut rest) = (fields.next()?, fields.skip(2));
    let pid = rest.next()?.parse().ok().filter(|pid| *pid != 0)?;
    (kind == "FLOCK" && rest.next()? == file).then_some(pid)
}

fn command_line(pid: u32) -> Option<String> {
    let bytes = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let words: Vec<_> = bytes.split(|byte| *byte == 0).map(String::from_utf8_lossy).collect();
    let line: String =
        words.join(" ").trim_end().chars().filter(|c| !c.is_control()).take(COMMAND_CHARS_MAX).collect();
    (!line.is_empty()).then_some(line)
}

#[cfg(test)]
mod tests {
    use rustix::fs::{FlockOperation, flock};

    use super::*;

    #[test]
    fn a_line_of_proc_locks_names_a_process() {
        let line = "12: FLOCK  ADVISORY  READ  4711 fe:01:131073 0 EOF";
        assert_eq!(pid_of(line, "fe:01:131073"), Some(4711));
        assert_eq!(pid_of(line, "fe:01:131074"), None);
        assert_eq!(pid_of("12: POSIX  ADVISORY  WRITE 4711 fe:01:131073 0 EOF", "fe:01:131073"), None);
        assert_eq!(pid_of("12: FLOCK  ADVISORY  WRITE 0 fe:01:131073 0 EOF", "fe:01:131073"), None);
        assert_eq!(pid_of("1: -> FLOCK", "fe:01:131073"), None);
    }

    #[test]
    fn the_holder_of_a_lock_is_named_with_its_command_line() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let first = File::open(file.path()).unwrap();
        flock(&first, FlockOperation::LockShared).unwrap();
        let found = lock_holder(file.as_file());
        let ours = format!("process {} (", std::process::id());
        assert!(found.starts_with(&ours) || found == "another process", "{found}");
        // Stacked filesystems may show another device number there.
        let shown = std::fs::read_to_string("/proc/locks").unwrap();
        assert_eq!(found != "another process", shown.contains(&ours_in_list(&first)), "{shown}");
    }

    fn ours_in_list(file: &File) -> String {
        let stat = fstat(file).unwrap();
        format!(" {:02x}:{:02x}:{} ", major(stat.st_dev), minor(stat.st_dev), stat.st_ino)
    }
}
