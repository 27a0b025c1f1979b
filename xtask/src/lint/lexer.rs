//! Splits Rust sources into code, comments and strings, without parsing them.

/// Kind of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenKind {
    Code,
    /// With its slashes.
    Comment,
    /// A string literal, with its quotes.
    Text,
    /// A character literal.
    Character,
}

/// The tokens of `source`, in order; together they are `source`. Neighbouring code may come in several tokens.
pub(crate) fn tokens(source: &str) -> Vec<(TokenKind, &str)> {
    let mut tokens = Vec::new();
    let (mut rest, mut in_word) = (source, false);
    while let Some(first) = rest.chars().next() {
        let (kind, length) = if rest.starts_with("//") {
            (TokenKind::Comment, rest.find('\n').unwrap_or(rest.len()))
        } else if rest.starts_with("/*") {
            (TokenKind::Comment, comment(rest))
        } else if first == '"' {
            (TokenKind::Text, string(rest))
        } else if (first == 'r' || rest.starts_with("br")) && !in_word && raw_string(rest) > 0 {
            (TokenKind::Text, raw_string(rest))
        } else if first == '\'' && character(rest) > 0 {
            (TokenKind::Character, character(rest))
        } else {
            (TokenKind::Code, first.len_utf8())
        };
        in_word = kind == TokenKind::Code && (first.is_alphanumeric() || first == '_');
        tokens.push((kind, &rest[..length]));
        rest = &rest[length..];
    }
    tokens
}

/// Length of a block comment, which may hold others.
fn comment(text: &str) -> usize {
    let mut depth = 0_usize;
    let mut at = 0;
    while at < text.len() {
        let rest = &text.as_bytes()[at..];
        if rest.starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest.starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    text.len()
}

/// Length of a string with escapes.
fn string(text: &str) -> usize {
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Length of a raw string, 0 if there is none.
fn raw_string(text: &str) -> usize {
    let body = text.trim_start_matches('b');
    let Some(body) = body.strip_prefix('r') else { return 0 };
    let hashes = body.len() - body.trim_start_matches('#').len();
    if !body[hashes..].starts_with('"') {
        return 0;
    }
    let end = format!("\"{}", "#".repeat(hashes));
    let start = text.len() - body.len() + hashes + 1;
    text[start..].find(&end).map_or(text.len(), |at| start + at + end.len())
}

/// Length of a character literal, 0 if the quote begins a lifetime.
fn character(text: &str) -> usize {
    let mut characters = text.char_indices().skip(1);
    match characters.next() {
        Some((_, '\\')) => {
            text[2..].char_indices().skip(1).find(|(_, c)| *c == '\'').map_or(0, |(at, _)| at + 3)
        }
        Some(_) => characters.next().filter(|(_, c)| *c == '\'').map_or(0, |(at, _)| at + 1),
        None => 0,
    }
}
