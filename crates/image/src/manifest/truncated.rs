//! Untrusted text in errors.

/// Maximum length of untrusted text in an error.
const SHOWN_BYTES_MAX: usize = 80;

/// Truncates untrusted text for an error.
pub(super) fn truncated(text: &str) -> String {
    if text.len() <= SHOWN_BYTES_MAX {
        return text.into();
    }
    let end = (0..=SHOWN_BYTES_MAX).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    format!("{}…", &text[..end])
}
