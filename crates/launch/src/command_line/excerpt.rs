//! Excerpts of texts, for errors.

/// The beginning of a text of unknown length, for errors.
pub(crate) fn excerpt(text: &str) -> String {
    const CHARS_MAX: usize = 80;
    let mut excerpt: String = text.chars().take(CHARS_MAX).flat_map(char::escape_debug).collect();
    if text.chars().nth(CHARS_MAX).is_some() {
        excerpt.push('…');
    }
    excerpt
}
