//! Logs: on standard error, one line each, every line of a copy with the copy's id. Nothing waits for them to be read
//! ([`console`]).
//!
//! `--log` or `TOWLINE_LOG` contains a filter of `tracing`: `debug`, or `warn,towline_vhost_user=debug`. A copy is a process of its
//! own, so every line belongs to it and begins with its id, which is in the first JSON event too.

use std::fmt;
use std::hash::{BuildHasher as _, RandomState};

use anyhow::{Context as _, Result};
use tracing::{Event, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::{Format, Full, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::console;

/// Variable of the filter.
const VARIABLE: &str = "TOWLINE_LOG";

/// Identifier of one request in a log: 64 random bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RequestId(u64);

impl RequestId {
    pub(crate) fn new() -> Self {
        Self(RandomState::new().hash_one(std::process::id()))
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Initialises logging with the filter of the command line. Each line begins with the `request`, if there is one.
pub(crate) fn init(filter: Option<&str>, request: Option<RequestId>) -> Result<()> {
    let filter = match filter {
        Some(text) => EnvFilter::try_new(text).with_context(|| {
            format!("--log {text}: expected a level (error, warn, info, debug, trace) or targets with levels, as warn,towline_net=debug")
        })?,
        None => EnvFilter::try_from_env(VARIABLE).unwrap_or_else(|_| EnvFilter::new("warn")),
    };
    let lines = Lines { request, format: tracing_subscriber::fmt::format().without_time() };
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(console::Log).event_format(lines).init();
    Ok(())
}

struct Lines {
    request: Option<RequestId>,
    format: Format<Full, ()>,
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
        if let Some(request) = self.request {
            write!(writer, "{request} ")?;
        }
        self.format.format_event(context, writer, event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_ids_are_unique() {
        let [first, second] = [RequestId::new(), RequestId::new()];
        assert_ne!(first, second);
        assert_eq!(first.to_string().len(), 16);
    }
}
