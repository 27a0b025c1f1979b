//! Sends of each lane, in lines.

use towline_migration::{LaneSends, SendMethod, SendReason, SendTotals};

use crate::units::count;

/// Returns a line for the lanes of each method and reason, except for lanes without a choice.
pub(crate) fn lines(lanes: &[LaneSends]) -> Vec<String> {
    let mut alike: Vec<(SendMethod, SendReason, Vec<&LaneSends>)> = Vec::new();
    for lane in lanes.iter().filter(|lane| has_choice(lane)) {
        match alike.iter_mut().find(|(method, reason, _)| (*method, *reason) == (lane.method, lane.reason)) {
            Some((_, _, lanes)) => lanes.push(lane),
            None => alike.push((lane.method, lane.reason, vec![lane])),
        }
    }
    alike.iter().map(|(method, reason, lanes)| alike_line(*method, *reason, lanes)).collect()
}

/// Returns false for a lane that was configured to send plainly, or cannot send otherwise.
fn has_choice(lane: &LaneSends) -> bool {
    let is_choice = !matches!(lane.reason, SendReason::Unsupported | SendReason::Compressed);
    is_choice && (lane.method, lane.reason) != (SendMethod::Plain, SendReason::Asked)
}

fn alike_line(method: SendMethod, reason: SendReason, lanes: &[&LaneSends]) -> String {
    let sum = |of: fn(&LaneSends) -> u64| count(lanes.iter().map(|lane| of(lane)).sum());
    let mut line = format!(
        "{} {method}: {reason}; {} packets plain, {} zero-copy",
        lanes.len(),
        sum(|lane| lane.plain.packets),
        sum(|lane| lane.zero_copy.packets)
    );
    let (sent, copied) = (lanes.iter().map(|lane| lane.zero_copied).sum::<u64>(), sum(|lane| lane.copied));
    if lanes.iter().any(|lane| lane.zero_copy.packets > 0) {
        line.push_str(&format!(" (kernel: {} not copied, {copied} copied)", count(sent)));
    }
    let spliced: u64 = lanes.iter().map(|lane| lane.spliced.packets).sum();
    if spliced > 0 {
        line.push_str(&format!(", {} spliced", count(spliced)));
    }
    let cost = |of: fn(&LaneSends) -> SendTotals| {
        let all = lanes.iter().map(|lane| of(lane)).fold(SendTotals::default(), SendTotals::plus);
        all.cpu_ms_per_gb().map_or_else(|| "?".to_owned(), |cost| format!("{cost:.0}"))
    };
    line.push_str(&format!("; {} | {}", cost(|lane| lane.plain), cost(|lane| lane.zero_copy)));
    if spliced > 0 {
        line.push_str(&format!(" | {}", cost(|lane| lane.spliced)));
    }
    line.push_str(" ms CPU/GB");
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_of_one_method_and_reason_share_a_line() {
        let packets = |packets| SendTotals { packets, ..SendTotals::default() };
        let measured = SendTotals {
            packets: 30,
            bytes: 15_000_000,
            measured_packets: 2,
            measured_bytes: 1_000_000,
            measured_cpu_ns: 50_000,
        };
        let copied = LaneSends {
            reason: SendReason::Copied,
            plain: measured,
            zero_copy: packets(1),
            copied: 1,
            ..LaneSends::default()
        };
        let spared = LaneSends {
            method: SendMethod::ZeroCopy,
            reason: SendReason::CostsLess,
            zero_copy: packets(1234),
            zero_copied: 1235,
            switches: 1,
            ..LaneSends::default()
        };
        let spliced = LaneSends {
            method: SendMethod::Splice,
            reason: SendReason::SpliceCostsLess,
            plain: measured,
            spliced: SendTotals { measured_cpu_ns: 20_000, ..measured },
            ..LaneSends::default()
        };
        let unsupported = LaneSends { reason: SendReason::Unsupported, ..LaneSends::default() };
        let lines = lines(&[copied, spared, copied, spliced, unsupported, LaneSends::default()]);
        assert_eq!(
            lines,
            [
                format!(
                    "2 plain: {}; 60 packets plain, 2 zero-copy (kernel: 0 not copied, 2 copied); 50 | ? ms CPU/GB",
                    SendReason::Copied
                ),
                format!(
                    "1 zero-copy: {}; 0 packets plain, {} zero-copy (kernel: {} not copied, 0 copied); ? | ? ms CPU/GB",
                    SendReason::CostsLess,
                    count(1234),
                    count(1235)
                ),
                format!(
                    "1 splice: {}; 30 packets plain, 0 zero-copy, 30 spliced; 50 | ? | 20 ms CPU/GB",
                    SendReason::SpliceCostsLess
                ),
            ]
        );
    }
}
