//! Progress and result of a copy.

use std::fmt::Display;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Serialize;
use towline_control::plan::{
    ComparedDisks, CopyReport, DestinationState, DiskProgress, PostcopyReport, Progress, SourceState,
};
use towline_image::{Increment, Uploaded};
use towline_memload::{CheckOutcome, ReceivedMemory};
use towline_migration::postcopy::FaultCounts;
use towline_migration::{LaneSends, SendTotals};

use super::identifiers::{Counters, send_method_reason};
use crate::progress::{Estimate, Outlook};

objects! {
    #![serde(rename_all = "kebab-case")]

    /// Progress of the memory, at most twice per second.
    CopyProgress(progress: &Progress, estimate: &Estimate) {
        /// Counters of QEMU's query-migrate.
        ram: Counters = progress.moved.entries().into_iter().collect(),
        pass: u64 = estimate.pass,
        bytes_rate: Option<u64> = estimate.rate,
        dirty_bytes_rate: Option<u64> = progress.dirty_rate,
        remaining: Option<u64> = progress.remaining,
        cpu_throttle_percentage: Option<u64> = progress.throttle_percent,
        expected_downtime: Option<u64> = progress.expected_downtime.map(milliseconds),
        downtime_limit: Option<u64> = progress.downtime_limit.map(milliseconds),
        outlook: Outlook = estimate.outlook,
        /// Of disks, which are copied before the memory.
        disks: Option<DiskProgress> = progress.disks,
        faults: Option<Faults> = progress.faults.as_ref().map(Faults::new),
        expected_time: Option<u64> = estimate.time_left.map(milliseconds),
    }

    /// A copy or move has succeeded. Exit status 0.
    Completed(ends: [&dyn Display; 2], report: &CopyReport, memory: Option<CheckOutcome>) {
        source: String = ends[0].to_string(),
        destination: String = ends[1].to_string(),
        total_time: u64 = milliseconds(report.total_time),
        downtime: Option<u64> = report.downtime_ms,
        multifd_channels: usize = report.multifd_channels,
        #[schemars(extend("enum" = ["none", "zlib", "zstd"]))]
        multifd_compression: &'static str = report.compression.method().name(),
        compression_ratio: Option<f64> = report.compression_ratio(),
        #[schemars(extend("enum" = ["auto", "on", "off"]))]
        zero_copy_send: String = report.zero_copy_send.to_string(),
        lanes: Vec<Lane> = report.lane_sends.iter().enumerate().map(|(lane, sends)| Lane::new(lane, sends)).collect(),
        handed_over: bool = report.loaded_by_qemu,
        source_state: SourceState = report.source,
        source_text: &'static str = report.source.text(),
        destination_state: DestinationState = report.destination,
        destination_text: &'static str = report.destination.text(),
        /// Counters of QEMU's query-migrate.
        ram: Counters = report.moved.entries().into_iter().collect(),
        compared_disks: Option<ComparedDisks> = report.compared_disks,
        postcopy: Option<Postcopy> = report.postcopy.as_ref().map(Postcopy::new),
        uploaded: Option<Uploaded> = report.uploaded,
        memory: Option<ReceivedMemory> = memory.map(Into::into),
        increment: Option<Increment> = report.increment,
    }
}

objects! {
    #![serde(rename_all = "kebab-case", deny_unknown_fields)]

    /// Sends of a lane.
    Lane(lane: usize, sends: &LaneSends) {
        lane: usize = lane,
        #[schemars(extend("enum" = ["plain", "zero-copy", "splice"]))]
        mode: String = sends.method.to_string(),
        #[schemars(extend("enum" = [
            "requested", "undecided", "unsupported", "compressed", "copied", "costs-more", "costs-less",
            "splice-costs-less", "no-memory"
        ]))]
        reason: &'static str = send_method_reason(sends.reason),
        reason_text: String = sends.reason.to_string(),
        switches: u64 = sends.switches,
        plain: Totals = Totals::new(&sends.plain),
        zero_copy: Totals = Totals::new(&sends.zero_copy),
        spliced: Totals = Totals::new(&sends.spliced),
        sends_zero_copied: u64 = sends.zero_copied,
        sends_copied: u64 = sends.copied,
    }

    /// Sends of one method.
    Totals(totals: &SendTotals) {
        packets: u64 = totals.packets,
        #[schemars(with = "Option<f64>")]
        cpu_ns_per_packet: Option<u64> = totals.cpu_ns_per_packet(),
        cpu_ms_per_gb: Option<f64> = totals.cpu_ms_per_gb(),
    }

    /// Faults of a postcopy.
    Faults(faults: &FaultCounts) {
        requests: u64 = faults.requests,
        served: u64 = faults.served,
        on_their_way: u64 = faults.late,
        latency_p50_us: Option<u64> = faults.latency_p50.map(|time| time.as_micros() as u64),
        latency_p99_us: Option<u64> = faults.latency_p99.map(|time| time.as_micros() as u64),
    }

    /// A postcopy.
    Postcopy(report: &PostcopyReport) {
        running_after: Option<u64> = report.running_after.map(milliseconds),
        faults: Faults = Faults::new(&report.faults),
        working_set_pages: u64 = report.working_set_pages,
        recoveries: u64 = report.recoveries,
    }
}

fn milliseconds(time: Duration) -> u64 {
    time.as_millis() as u64
}

#[cfg(test)]
mod tests {
    use towline_migration::SendReason;

    use super::*;

    #[test]
    fn a_lane_has_its_identifiers_and_costs() {
        let plain = SendTotals { measured_packets: 2, measured_cpu_ns: 50_000, ..SendTotals::default() };
        let sends = LaneSends { reason: SendReason::Copied, plain, ..LaneSends::default() };
        let lane = serde_json::to_value(Lane::new(0, &sends)).unwrap();
        assert_eq!(lane["plain"]["cpu-ns-per-packet"], 25_000);
        assert_eq!((&lane["mode"], &lane["reason"]), (&"plain".into(), &"copied".into()));
    }
}
