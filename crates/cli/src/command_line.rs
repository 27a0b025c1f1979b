//! Command lines of QEMU, for display.

use std::ffi::OsStr;

use towline_control::run::recorded_command_line;
use towline_image::Origin;

use crate::progress::Reporter;

/// Prints what the image has.
pub(crate) fn print(reporter: &Reporter, origin: Option<&Origin>) {
    let recorded = match origin.map(recorded_command_line) {
        Some(Ok(Some(recorded))) => recorded,
        Some(Err(error)) => return reporter.line(&format!("  command line  cannot be read: {error}")),
        None | Some(Ok(None)) => {
            return reporter.line("  command line  none: `towline run` needs all arguments of QEMU");
        }
    };
    reporter.line(
        "  command line  of the QEMU that ran the guest, untrusted as the image is; `towline run` uses it",
    );
    for option in recorded.command_line().options() {
        let value = option.value_text().map(|value| format!(" {}", quoted(value.as_ref())));
        reporter.line(&format!("    {}{}", option.name, value.unwrap_or_default()));
    }
    for key in recorded.redacted_keys() {
        reporter.line(&format!(
            "    left out: {} (a secret, set it with --set {key}=VALUE)",
            quoted(key.as_ref())
        ));
    }
    if let Some(directory) = origin.and_then(|origin| origin.process.as_ref()?.working_directory.as_deref()) {
        reporter.line(&format!("    working directory: {}", quoted(directory.as_ref())));
    }
}

/// Quotes a word for a shell, with control characters escaped.
pub(crate) fn quoted(word: &OsStr) -> String {
    let text: String = word.to_string_lossy().chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_=.,:/+@%".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        return text;
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_for_a_shell() {
        assert_eq!(quoted("-m".as_ref()), "-m");
        assert_eq!(quoted("a b".as_ref()), "'a b'");
        assert_eq!(quoted("it's".as_ref()), r"'it'\''s'");
        assert_eq!(quoted("".as_ref()), "''");
        assert_eq!(quoted("\x1b[2J".as_ref()), "'?[2J'");
    }
}
