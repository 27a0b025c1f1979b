//! `towline check`.

use anyhow::{Context, Result};
use serde_json::json;
use towline_channel::Address;
use towline_compat::{ConfiguredBy, Finding, Report, Severity, Verdict};
use towline_control::check::{self, CheckEnd, Intent};

use crate::Exit;
use crate::args::CheckArgs;
use crate::console;
use crate::endpoint::Endpoint;
use crate::progress::Reporter;

/// Runs the command.
pub(crate) fn run(args: &CheckArgs) -> Result<Exit> {
    let reporter = Reporter::new(&args.output).waits_for_readers();
    let source = match end(&args.source) {
        Ok(source) => source,
        Err(refused) => return Ok(refused.tell(&reporter)),
    };
    if let Some(path) = &args.facts_out {
        let facts = match source.facts() {
            Ok(facts) => facts,
            Err(error) => return Ok(Refused::Unknown(error.to_string()).tell(&reporter)),
        };
        check::write_facts(path, &facts).with_context(|| path.display().to_string())?;
        reporter
            .event("facts", json!({ "source": args.source.to_string(), "file": path.display().to_string() }));
        reporter.line(&format!("{}: what is known of it is in {}", args.source, path.display()));
        return Ok(Exit::Done);
    }
    let Some(to) = &args.destination else { return Ok(Exit::Usage) };
    let destination = match end(to) {
        Ok(destination) => destination,
        Err(refused) => return Ok(refused.tell(&reporter)),
    };
    let intent = Intent { lanes: Some(args.multifd_channels), is_postcopy: args.postcopy };
    match check::check(&source, &destination, intent) {
        Ok(report) => Ok(tell(&reporter, args, to, &report)),
        Err(error) => Ok(Refused::Unknown(error.to_string()).tell(&reporter)),
    }
}

/// Why there is no verdict.
enum Refused {
    Usage(String),
    Unknown(String),
}

impl Refused {
    fn tell(&self, reporter: &Reporter) -> Exit {
        let (exit, text) = match self {
            Self::Usage(text) => (Exit::Usage, text),
            Self::Unknown(text) => (Exit::CouldNotTell, text),
        };
        let verdict = matches!(self, Self::Unknown(_)).then_some(Verdict::CouldNotTell);
        reporter.event("checked", json!({ "verdict": verdict, "error": text, "exit": exit.code() }));
        console::error(text);
        exit
    }
}

/// As one that can be asked.
fn end(endpoint: &Endpoint) -> Result<CheckEnd, Refused> {
    Ok(match endpoint {
        Endpoint::Qmp(path) => CheckEnd::Qmp(path.clone()),
        Endpoint::Image(path) => CheckEnd::Image(path.clone()),
        Endpoint::Facts(path) => CheckEnd::Facts(path.clone()),
        Endpoint::Attribute(path) => CheckEnd::Attribute(path.clone()),
        Endpoint::Control(path) => CheckEnd::Control(path.clone()),
        Endpoint::Stream(Address::Exec(command)) => CheckEnd::Command(command.clone()),
        Endpoint::Stream(_) => {
            return Err(Refused::Unknown(format!(
                "{endpoint} cannot be asked: write down what is known there (`towline check --facts-out FILE qmp:PATH`), and compare with facts:FILE"
            )));
        }
        #[cfg(feature = "store")]
        Endpoint::Store(_) => {
            return Err(Refused::Unknown(format!(
                "{endpoint}: only an image in a file can be checked: copy it first"
            )));
        }
        #[cfg(feature = "store")]
        Endpoint::Secret(why) => return Err(Refused::Usage(why.clone())),
        Endpoint::Memory(_) | Endpoint::Null => {
            return Err(Refused::Usage(format!("{endpoint} takes any guest, there is nothing to check")));
        }
    })
}

fn tell(reporter: &Reporter, args: &CheckArgs, to: &Endpoint, report: &Report) -> Exit {
    let (verdict, by_hand) = (report.verdict(ConfiguredBy::Towline), report.verdict(ConfiguredBy::ByHand));
    let exit = match verdict {
        Verdict::Yes | Verdict::YesWithNotes => Exit::Done,
        Verdict::No => Exit::Safe,
        Verdict::CouldNotTell => Exit::CouldNotTell,
    };
    reporter.event(
        "checked",
        json!({
            "source": args.source.to_string(),
            "destination": to.to_string(),
            "verdict": verdict,
            "by-hand": by_hand,
            "findings": report.findings(),
            "exit": exit.code(),
        }),
    );
    reporter.line(&format!("{} to {to}: {verdict}", args.source));
    report.of(ConfiguredBy::Towline).for_each(|finding| line(reporter, finding));
    if by_hand != verdict {
        reporter.line(&format!("by QEMU's own `migrate`, with what is set now: {by_hand}"));
        let own = report.of(ConfiguredBy::ByHand).filter(|finding| finding.way == Some(ConfiguredBy::ByHand));
        own.for_each(|finding| line(reporter, finding));
    }
    exit
}

fn line(reporter: &Reporter, finding: &Finding) {
    let word = match finding.severity {
        Severity::No => "no",
        Severity::Unknown => "unknown",
        Severity::Note => "note",
    };
    reporter.line(&format!("  {word:<8} {:<18} {}", finding.rule, finding.text));
    if !finding.remedy.is_empty() {
        reporter.line(&format!("  {:<8} {:<18} → {}", "", "", finding.remedy));
    }
}
