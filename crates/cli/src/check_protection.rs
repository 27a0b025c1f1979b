//! `towline check --protect`.

use std::time::Duration;

use anyhow::Result;
use towline_compat::ConfiguredBy;
use towline_control::plan::Observer as _;
use towline_control::protect::{CostRequest, DISKS, EpochCost, Forecast, foresee};
use towline_control::remote::{DepartingGuest, NewGuest, Place};

use crate::args::CheckArgs;
use crate::check::{self, NoVerdict, line, place_options};
use crate::endpoint::{Endpoint, SshEndpoint};
use crate::events::{Checked, FinalEvent, Protectable};
use crate::exit::Exit;
use crate::progress::Reporter;
use crate::remote;
use crate::signals::HeldSignals;
use crate::units::size;

/// Epochs that are compared.
const EPOCHS_MS: [u64; 3] = [25, 50, 100];

/// Runs the command.
pub(crate) fn run(args: &CheckArgs) -> Result<Exit> {
    let reporter = Reporter::new(&args.output).blocking();
    check::wait_for_sockets(args)?;
    // The QEMU there is ended, and a cancellation reported, before a signal ends this process.
    let held = HeldSignals::hold()?;
    let checked = estimate(&reporter, args, &held);
    if checked.is_err() {
        // It may be the signal's, which would end this process before that is written.
        held.forget();
    }
    NoVerdict::reported(&reporter, checked)
}

fn estimate(reporter: &Reporter, args: &CheckArgs, held: &HeldSignals) -> Result<Exit> {
    let usage =
        |end: &Endpoint, expected| Err(NoVerdict::Usage(format!("{end}: expected {expected}")).into());
    let Endpoint::Qmp(socket) = &args.source else {
        return usage(&args.source, "qmp:PATH of a running guest");
    };
    let there = match &args.destination {
        None => None,
        Some(Endpoint::Ssh(SshEndpoint { target, place: Place::Guest(given) })) => {
            // Its memory is one that the other host writes, as `protect` has it.
            let place = Place::Guest(NewGuest { is_standby: true, ..given.clone() });
            Some(SshEndpoint { target: target.clone(), place })
        }
        Some(end) => return usage(end, "ssh:HOST, or ssh:HOST/NAME with the guest's name there"),
    };
    let planned = &args.protection;
    let request = CostRequest {
        epochs: planned
            .epoch
            .map_or_else(|| EPOCHS_MS.map(Duration::from_millis).into(), |epoch| vec![epoch]),
        checkpoint_bytes_max: planned.max_checkpoint,
        leaks_output: planned.leak_output,
    };
    let options = place_options(args, 0, DISKS, held.arrived());
    let (guest, report) = match &there {
        Some(end) => {
            let prepared = remote::prepare(end, &options, socket).map_err(|error| NoVerdict::of(&error))?;
            reporter.hosts(&prepared.host.hosts_of(&prepared.guest, &prepared.fit));
            let report = prepared.guest.compare(&prepared.fit, options.lanes);
            (prepared.guest, Some(report))
        }
        None => {
            let place = Place::Guest(NewGuest::default());
            let guest = DepartingGuest::of(socket, place, DISKS, None, Some(held.arrived()));
            (guest.map_err(|error| NoVerdict::of(&error))?, None)
        }
    };
    let forecast = foresee(socket, &guest, report, &request);
    let forecast = forecast.map_err(|error| NoVerdict::Unknown(error.to_string()))?;
    Ok(report_forecast(reporter, args, &forecast))
}

fn report_forecast(reporter: &Reporter, args: &CheckArgs, forecast: &Forecast) -> Exit {
    let (to, verdict) = (args.destination.as_ref(), forecast.report.verdict(ConfiguredBy::Towline));
    let exit = check::exit(verdict);
    let protectable = Protectable::new(&args.source, to, forecast);
    reporter.result(FinalEvent::Checked(Checked::Protectable(protectable)), exit);
    let to = to.map(|to| format!(" to {to}")).unwrap_or_default();
    reporter.line(&format!("protection of {}{to}: {verdict}", args.source));
    forecast.report.of(ConfiguredBy::Towline).for_each(|finding| line(reporter, finding));
    if !forecast.costs.is_empty() {
        reporter.line(
            "estimated by what the guest writes now, for each epoch, by which its replies are delayed:",
        );
    }
    for cost @ EpochCost { epoch, bytes, pause } in &forecast.costs {
        let (bandwidth, share) = (size(cost.bandwidth()), cost.stopped_share() * 100.0);
        reporter.line(&format!(
            "  {epoch:<8?} checkpoint {}, link {bandwidth}/s; guest stopped {:.1} ms ({share:.1} % of the time)",
            size(*bytes),
            pause.as_secs_f64() * 1e3,
        ));
    }
    exit
}
