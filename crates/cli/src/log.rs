//! Logs: on standard error, one line each, every line of a copy with the copy's id. Nothing waits for them to
//! be read ([`console`]).
//!
//! `--log` or `TOWLINE_LOG` contains a filter of `tracing`: `debug`, or `warn,towline_vhost_user=debug`. Each
//! copy is a separate process, so every line belongs to it and begins with its id, which is in the first JSON
//! event too. Warnings and errors have a budget for each place in the code that writes them.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher as _, RandomState};
use std::io::IsTerminal as _;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use tracing::callsite::Identifier;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::{Format, Full, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::console;
use crate::lock::lock;

/// Maximum number of lines of one kind in an interval.
const LINES_MAX: u64 = 50;
const INTERVAL: Duration = Duration::from_secs(10);
/// Variable of the filter.
const VARIABLE: &str = "TOWLINE_LOG";
const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
const EXPECTED: &str = "expected a level (error, warn, info, debug, trace), or targets of towline with levels, \
                        such as warn,towline_net=debug";

/// Returns an identifier of one request in a log: 64 random bits.
pub(crate) fn request_id() -> String {
    format!("{:016x}", RandomState::new().hash_one(std::process::id()))
}

/// Initialises logging with the filter of the command line. Each line begins with the `request`, if there is
/// one.
///
/// # Errors
/// The filter is invalid.
pub(crate) fn init(filter: Option<&str>, request: Option<&str>) -> Result<()> {
    let variable = std::env::var(VARIABLE).ok().filter(|text| !text.is_empty());
    let directives = match (filter, &variable) {
        (Some(text), _) => parse(text).with_context(|| format!("--log {text}"))?,
        (None, Some(text)) => parse(text).with_context(|| format!("{VARIABLE}={text}"))?,
        (None, None) => EnvFilter::new("warn"),
    };
    // A filter names targets, which are modules; the default's warnings are for people.
    let shows_targets = filter.is_some() || variable.is_some();
    let has_colors = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let format =
        tracing_subscriber::fmt::format().without_time().with_target(shows_targets).with_ansi(has_colors);
    // By default warnings look like the other messages of a command.
    let (prefix, format) = if shows_targets {
        (request.map(|request| format!("{request} ")).unwrap_or_default(), Some(format))
    } else {
        ("towline: ".to_owned(), None)
    };
    let lines = Lines { prefix, format, budget: LineBudget::default() };
    let subscriber = tracing_subscriber::fmt().with_env_filter(directives).with_ansi(has_colors);
    subscriber.with_writer(|| console::Log).event_format(lines).init();
    Ok(())
}

/// Parses a filter. `EnvFilter` alone would take a misspelt level for the name of a target.
fn parse(text: &str) -> Result<EnvFilter> {
    for directive in text.split(',').map(str::trim) {
        let level = match directive.rsplit_once('=') {
            // Fields and spans of `tracing` may contain an equals sign.
            Some((_, level)) if !level.ends_with(']') => level,
            _ if directive.contains(['[', ':']) || directive.starts_with("towline") => continue,
            _ => directive,
        };
        ensure!(
            LEVELS.contains(&level.to_ascii_lowercase().as_str()),
            "{level:?} is not a level: {EXPECTED}"
        );
    }
    EnvFilter::try_new(text).context(EXPECTED)
}

struct Lines {
    prefix: String,
    /// Level, target and message; `None` for the message alone.
    format: Option<Format<Full, ()>>,
    budget: LineBudget,
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        let mut suppressed = 0;
        // Others are written at the user's request.
        if *metadata.level() <= Level::WARN {
            let Some(before) = self.budget.admit(metadata.callsite(), Instant::now()) else { return Ok(()) };
            suppressed = before;
        }
        write!(writer, "{}", self.prefix)?;
        if suppressed > 0 {
            write!(writer, "[{suppressed} lines like this one were suppressed] ")?;
        }
        let Some(format) = &self.format else {
            context.field_format().format_fields(writer.by_ref(), event)?;
            return writeln!(writer);
        };
        format.format_event(context, writer, event)
    }
}

/// Budget of lines of each kind, which is the place in the code that writes them. Guests, frontends and clients of a device can cause
/// warnings without end, which would fill the host's disk and hide the lines of others.
#[derive(Debug, Default)]
struct LineBudget(Mutex<HashMap<Identifier, LogWindow>>);

/// Lines of one kind in the present interval.
#[derive(Debug)]
struct LogWindow {
    since: Instant,
    lines: u64,
}

impl LineBudget {
    /// Counts a line. Returns the number of lines of its kind that were suppressed before it; `None` if it is suppressed too.
    fn admit(&self, kind: Identifier, now: Instant) -> Option<u64> {
        let mut windows = lock(&self.0);
        let window = windows.entry(kind).or_insert(LogWindow { since: now, lines: 0 });
        let mut suppressed = 0;
        if now.saturating_duration_since(window.since) >= INTERVAL {
            suppressed = window.lines.saturating_sub(LINES_MAX);
            *window = LogWindow { since: now, lines: 0 };
        }
        window.lines += 1;
        (window.lines <= LINES_MAX).then_some(suppressed)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn warnings_of_one_kind_are_limited() {
        let written = Written::default();
        let (writer, format) = (written.clone(), tracing_subscriber::fmt::format().without_time());
        let lines = Lines { prefix: String::new(), format: Some(format), budget: LineBudget::default() };
        let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).with_ansi(false);
        tracing::subscriber::with_default(subscriber.event_format(lines).finish(), || {
            for number in 0..10_000 {
                tracing::warn!(number, "a guest's fault");
                tracing::info!(number, "requested");
            }
            tracing::error!("of another kind");
        });
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        let count = |part: &str| text.lines().filter(|line| line.contains(part)).count();
        // A slow machine may reach the next interval.
        assert!((50..=500).contains(&count("a guest's fault")), "{}", count("a guest's fault"));
        assert_eq!((count("requested"), count("of another kind"), count("number=0")), (10_000, 1, 2));
    }

    #[test]
    fn a_wrong_level_is_an_error() {
        for text in
            ["debug", "WARN", "warn,towline_net=debug", "towline_control", "towline_qmp[send]=trace", "off"]
        {
            assert!(parse(text).is_ok(), "{text}");
        }
        for text in ["nonsense", "debgu", "warn,towline_net=loud", "verbose", "5"] {
            let error = format!("{:#}", parse(text).unwrap_err());
            assert!(error.contains("is not a level: expected a level (error, warn,"), "{error}");
        }
    }

    #[test]
    fn request_ids_are_unique() {
        let [first, second] = [request_id(), request_id()];
        assert_ne!(first, second);
        assert_eq!(first.len(), 16);
    }
}
