//! `towline copy`.

use std::time::Duration;

use anyhow::Result;
use serde_json::json;
use towline_control::plan::{
    self, DestinationState, Error, Failure, GuestState, Options, Report, Source, SourceState,
};

use crate::Exit;
use crate::args::{CopyArgs, Method, Switch};
use crate::endpoint::Endpoint;
use crate::progress::{Reporter, ram};
use crate::signals::cancel_on_signals;
use crate::units::{count, size};

/// Runs the command.
pub(crate) fn run(args: &CopyArgs) -> Result<Exit> {
    let reporter = Reporter::new(&args.output);
    let source = match args.source.source() {
        Ok(source) => source,
        Err(text) => return Ok(usage(&reporter, &text)),
    };
    if args.destinations.len() > 1 && !matches!(source, Source::Image(_)) {
        let text = format!(
            "{} destinations, but {} can be read only once: copy it to an image first, and the image to all of them",
            args.destinations.len(),
            args.source
        );
        return Ok(usage(&reporter, &text));
    }
    if let Some(text) = level_of_nothing(args) {
        return Ok(usage(&reporter, text));
    }
    let cancel = cancel_on_signals("the source keeps its guest")?;
    let options = options(args);
    let mut exit = Exit::Done;
    for destination in &args.destinations {
        let copied = plan::copy(&source, &destination.destination(), &options, &cancel, &reporter);
        reporter.finish();
        match copied {
            Ok(report) => tell(&reporter, args, destination, &report),
            Err(failure) => {
                let this = tell_failure(&reporter, args, destination, &failure);
                exit = if exit == Exit::LookAt { exit } else { this };
            }
        }
        if cancel.is_cancelled() {
            break;
        }
    }
    Ok(exit)
}

fn options(args: &CopyArgs) -> Options {
    Options {
        multifd_channels: args.multifd_channels,
        compression: args.compression.at(args.multifd_zlib_level, args.multifd_zstd_level),
        max_bandwidth: args.max_bandwidth,
        downtime_limit: Duration::from_millis(args.downtime_limit),
        verify: args.verify,
        resume: args.resume,
        run: (args.run || args.paused).then_some(args.run),
        return_path: args.return_path == Switch::On,
        stream: args.stream,
        overwrite: args.overwrite,
        connect_timeout: args.connect_timeout,
    }
}

/// A level of what is not used was meant for something.
fn level_of_nothing(args: &CopyArgs) -> Option<&'static str> {
    if args.multifd_zlib_level.is_some() && args.compression != Method::Zlib {
        return Some("--multifd-zlib-level is for --compression zlib");
    }
    let is_of_nothing = args.multifd_zstd_level.is_some() && args.compression != Method::Zstd;
    is_of_nothing.then_some("--multifd-zstd-level is for --compression zstd")
}

fn usage(reporter: &Reporter, text: &str) -> Exit {
    reporter.event("failed", json!({ "error": text, "exit": Exit::Usage.code() }));
    eprintln!("towline: {text}");
    Exit::Usage
}

fn tell(reporter: &Reporter, args: &CopyArgs, destination: &Endpoint, report: &Report) {
    let moved = &report.moved;
    let source = match report.source {
        SourceState::Running => "runs on",
        SourceState::Paused => "paused (postmigrate); `cont` runs it on",
        SourceState::Unchanged => "as it was",
    };
    let state = match report.destination {
        DestinationState::Running => "runs",
        DestinationState::Paused => "loaded, paused",
        DestinationState::Stored => "stored, synced",
        DestinationState::Loaded => "loaded",
        DestinationState::Dropped => "counted and dropped",
    };
    reporter.event(
        "completed",
        json!({
            "source": args.source.to_string(),
            "destination": destination.to_string(),
            "total-time": report.total_time.as_millis() as u64,
            "downtime": report.downtime_ms,
            "multifd-channels": report.multifd_channels,
            "multifd-compression": report.compression.method().name(),
            "compression-ratio": report.compression_ratio(),
            "handed-over": report.handed_over,
            "source-state": source,
            "destination-state": state,
            "ram": ram(moved),
        }),
    );
    tell_people(reporter, args, destination, report, [source, state]);
}

fn tell_people(
    reporter: &Reporter,
    args: &CopyArgs,
    destination: &Endpoint,
    report: &Report,
    [source, state]: [&str; 2],
) {
    let moved = &report.moved;
    let seconds = report.total_time.as_secs_f64();
    reporter.line(&format!("copied {} to {destination} in {seconds:.2} s", args.source));
    reporter.line(&format!(
        "  memory       {}: {} plain pages, {} zero pages",
        size(moved.total),
        count(moved.normal),
        count(moved.duplicate)
    ));
    match report.handed_over {
        true => reporter.line(&format!(
            "  moved        by QEMU, {} channels, from the image itself",
            report.multifd_channels
        )),
        false => reporter.line(&format!(
            "  moved        {} at {}/s over {} lanes, in {} vectored and {} plain calls",
            size(moved.transferred),
            size((moved.transferred as f64 / seconds) as u64),
            report.multifd_channels,
            count(moved.vectored_calls),
            count(moved.plain_calls)
        )),
    }
    if let Some(ratio) = report.compression_ratio() {
        let (pages, wire) = (size(moved.normal_bytes), size(moved.multifd_bytes));
        let method = report.compression.method().name();
        reporter
            .line(&format!("  compressed   {pages} of pages into {wire} on lanes, {ratio:.2}:1 ({method})"));
    }
    if let Some(downtime_ms) = report.downtime_ms {
        reporter.line(&format!("  downtime     {downtime_ms} ms"));
    }
    reporter.line(&format!("  source       {source}"));
    reporter.line(&format!("  destination  {state}"));
}

fn tell_failure(reporter: &Reporter, args: &CopyArgs, destination: &Endpoint, failure: &Failure) -> Exit {
    let exit = match (failure.error.as_ref(), &failure.guest) {
        (Error::Usage(_), _) => Exit::Usage,
        (_, GuestState::Safe | GuestState::Unreached) => Exit::Safe,
        (_, GuestState::LookAt(_)) => Exit::LookAt,
    };
    let guest = match &failure.guest {
        GuestState::Safe if matches!(args.source, Endpoint::Image(_)) => "in its image, which is as it was",
        GuestState::Safe => "safe at its source",
        GuestState::Unreached => "not touched; its QEMU could not be reached",
        GuestState::LookAt(text) => text,
    };
    reporter.event(
        "failed",
        json!({
            "destination": destination.to_string(),
            "error": failure.error.to_string(),
            "guest": guest,
            "notes": failure.notes,
            "exit": exit.code(),
        }),
    );
    eprintln!("towline: {failure}");
    if exit != Exit::Usage {
        eprintln!("towline: the guest: {guest}");
    }
    failure.notes.iter().for_each(|note| eprintln!("towline: note: {note}"));
    exit
}
