//! Where this machine gets Debian from, and the backports suite beside it.
//!
//! apt knows two formats: stanzas (`*.sources`, deb822) and one-line entries (`sources.list`, `*.list`). Whatever
//! entry brings `bookworm main` is copied with another suite, so that mirror, key and options stay the owner's choice.

/// The release that the set-up knows.
pub(crate) const CODENAME: &str = "bookworm";
/// The suite that has QEMU 10.0.
pub(crate) const BACKPORTS: &str = "bookworm-backports";

/// A file for /etc/apt/sources.list.d.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SourcesFile {
    pub(crate) name: &'static str,
    pub(crate) content: String,
}

/// What a file of sources says about the two suites.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// The backports suite is configured already.
    Backports,
    /// Debian itself is, and this file would put the backports beside it.
    Debian(SourcesFile),
    /// Neither.
    Nothing,
}

/// Reads one file of sources; `deb822` tells the format.
pub(crate) fn read(content: &str, deb822: bool) -> Found {
    let found: Vec<Found> = if deb822 { stanzas(content) } else { content.lines().map(one_line).collect() };
    let mut best = Found::Nothing;
    for entry in found {
        match entry {
            Found::Backports => return Found::Backports,
            Found::Debian(_) if best == Found::Nothing => best = entry,
            _ => {}
        }
    }
    best
}

fn stanzas(content: &str) -> Vec<Found> {
    let lines: Vec<&str> = content.lines().filter(|line| !line.starts_with('#')).collect();
    lines.split(|line| line.trim().is_empty()).map(stanza).collect()
}

fn stanza(lines: &[&str]) -> Found {
    let value = |wanted: &str| -> Vec<&str> {
        let mut inside = false;
        let mut words = Vec::new();
        for line in lines {
            if line.starts_with([' ', '\t']) {
                if inside {
                    words.extend(line.split_whitespace());
                }
            } else if let Some((name, rest)) = line.split_once(':') {
                inside = name.eq_ignore_ascii_case(wanted);
                if inside {
                    words.extend(rest.split_whitespace());
                }
            }
        }
        words
    };
    let binary = value("Types").contains(&"deb") && value("Components").contains(&"main");
    if !binary || value("Enabled") == ["no"] {
        return Found::Nothing;
    }
    if value("Suites").contains(&BACKPORTS) {
        return Found::Backports;
    }
    if !value("Suites").contains(&CODENAME) {
        return Found::Nothing;
    }
    let mut content = String::new();
    let mut replaced = false;
    for line in lines {
        let name = line.split(':').next().unwrap_or_default();
        if !line.starts_with([' ', '\t']) {
            replaced = ["types", "suites", "components"].contains(&name.to_ascii_lowercase().as_str());
        }
        if !replaced {
            content.push_str(line);
            content.push('\n');
        }
    }
    let content = format!("{HEADER}Types: deb\nSuites: {BACKPORTS}\nComponents: main\n{content}");
    Found::Debian(SourcesFile { name: "towline-backports.sources", content })
}

fn one_line(line: &str) -> Found {
    let Some(rest) = line.split('#').next().unwrap_or_default().trim().strip_prefix("deb") else {
        return Found::Nothing;
    };
    if !rest.starts_with([' ', '\t', '[']) {
        return Found::Nothing;
    }
    let rest = rest.trim();
    let (options, rest) = match rest.strip_prefix('[').and_then(|inner| inner.split_once(']')) {
        Some((options, rest)) => (format!("[{}] ", options.trim()), rest),
        None => (String::new(), rest),
    };
    let words: Vec<&str> = rest.split_whitespace().collect();
    match words[..] {
        [_, suite, ref components @ ..] if components.contains(&"main") && suite == BACKPORTS => {
            Found::Backports
        }
        [uri, suite, ref components @ ..] if components.contains(&"main") && suite == CODENAME => {
            Found::Debian(SourcesFile {
                name: "towline-backports.list",
                content: format!("{HEADER}deb {options}{uri} {BACKPORTS} main\n"),
            })
        }
        _ => Found::Nothing,
    }
}

const HEADER: &str = "# Written by towline's `cargo xtask setup` for QEMU 10.0; safe to delete.\n";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stanza_is_copied_with_another_suite() {
        let file = "Types: deb deb-src\n# a comment\nURIs: http://mirror.example/debian\n\
                    Suites: bookworm bookworm-updates\nComponents: main contrib\nSigned-By:\n /usr/share/key.gpg\n\n\
                    Types: deb\nURIs: http://mirror.example/security\nSuites: bookworm-security\nComponents: main\n";
        let Found::Debian(made) = read(file, true) else { panic!("Debian not found") };
        assert_eq!(made.name, "towline-backports.sources");
        let wanted = "Types: deb\nSuites: bookworm-backports\nComponents: main\n\
                      URIs: http://mirror.example/debian\nSigned-By:\n /usr/share/key.gpg\n";
        assert_eq!(made.content, format!("{HEADER}{wanted}"));
    }

    #[test]
    fn a_line_is_copied_with_its_options() {
        let file = "# deb http://old.example bookworm main\n\
                    deb-src http://mirror.example/debian bookworm main\n\
                    deb [arch=amd64 signed-by=/k.gpg] http://mirror.example/debian bookworm main contrib # here\n";
        let Found::Debian(made) = read(file, false) else { panic!("Debian not found") };
        assert_eq!(made.name, "towline-backports.list");
        let wanted =
            "deb [arch=amd64 signed-by=/k.gpg] http://mirror.example/debian bookworm-backports main\n";
        assert_eq!(made.content, format!("{HEADER}{wanted}"));
    }

    #[test]
    fn backports_are_recognised_in_both_formats() {
        let stanza = "Types: deb\nURIs: http://m.example/debian\nSuites: bookworm bookworm-backports\n\
                      Components: main\n";
        assert_eq!(read(stanza, true), Found::Backports);
        assert_eq!(read("deb http://m.example/debian bookworm-backports main\n", false), Found::Backports);
        let disabled = format!("Enabled: no\n{stanza}");
        assert_eq!(read(&disabled, true), Found::Nothing);
    }

    #[test]
    fn other_sources_are_nothing() {
        assert_eq!(read("deb http://m.example/node nodistro main\n", false), Found::Nothing);
        assert_eq!(
            read("Types: deb\nURIs: http://m.example\nSuites: sid\nComponents: main\n", true),
            Found::Nothing
        );
        assert_eq!(read("", true), Found::Nothing);
        assert_eq!(read("", false), Found::Nothing);
    }
}
