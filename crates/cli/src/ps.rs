//! `towline ps`.

use anyhow::Result;
use serde_json::json;
use towline_launch::RuntimeRoot;

use crate::args::PsArgs;
use crate::events;
use crate::exit::Exit;
use crate::progress::Reporter;

/// Runs the command.
pub(crate) fn run(args: &PsArgs) -> Result<Exit> {
    let reporter = Reporter::new(&args.output).blocking();
    let guests = RuntimeRoot::of_user().list()?;
    for guest in &guests {
        let fields = json!({
            "name": guest.name,
            "pid": guest.pid,
            "owner-pid": guest.owner_pid,
            "qmp": guest.qmp,
            "image": guest.image,
            "detached": guest.is_detached,
        });
        reporter.event("guest", fields);
        let image = guest.image.as_ref().map(|image| format!("  {}", image.display()));
        let detached = if guest.is_detached { "  detached" } else { "" };
        let (name, pid, qmp) = (&guest.name, guest.pid, guest.qmp.display());
        reporter.line(&format!("{name:<20} {pid:>8}  qmp:{qmp}{}{detached}", image.unwrap_or_default()));
    }
    reporter.event("guests", events::with_exit(json!({ "guests": guests.len() }), Exit::Done));
    if guests.is_empty() {
        reporter.line("no guests of this user on this host");
    }
    Ok(Exit::Done)
}
