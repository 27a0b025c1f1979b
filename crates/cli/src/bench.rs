//! `towline bench`.

use anyhow::Result;

use crate::Exit;
use crate::args::BenchArgs;
use crate::console;
use crate::sandbox;
use crate::signals::cancel_on_signals;

/// Runs the command.
pub(crate) fn run(args: &BenchArgs) -> Result<Exit> {
    if let Some(role) = &args.end {
        towline_bench::lanes::serve(role)?;
        return Ok(Exit::Done);
    }
    let options = towline_bench::Options {
        tables: args.tables.clone(),
        report: args.report.clone(),
        runs: args.runs,
        sizes_mib: args.sizes.iter().map(|size| size >> 20).collect(),
        rows: args.rows.clone(),
        towline: std::env::current_exe()?,
        peers: args.peers.clone(),
        filters: sandbox::filters(),
        cancel: cancel_on_signals("guests and images are put away")?,
    };
    match towline_bench::run(&options) {
        Ok(()) => Ok(Exit::Done),
        Err(error) => match error.downcast_ref::<towline_bench::UnknownTable>() {
            Some(unknown) => {
                console::error(&unknown.to_string());
                Ok(Exit::Usage)
            }
            None => Err(error),
        },
    }
}
