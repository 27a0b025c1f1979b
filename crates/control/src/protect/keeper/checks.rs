//! Guests that cannot be protected, refused before anything is changed.

use towline_compat::checkpoints::{DirtyLog, check};
use towline_compat::facts::QemuFacts;

use super::request::Error;
use crate::remote::DepartingGuest;

/// Refuses a guest that would be lost, or whose output would not be held.
pub(crate) fn check_departing(guest: &DepartingGuest, leaks_output: bool) -> Result<(), Error> {
    let line = guest.new_guest().map(|guest| &*guest.command_line).unwrap_or_default();
    let cards = guest.card_controls().len();
    guest.qemu().map_or(Ok(()), |facts| check_guest(facts, line, cards, leaks_output))
}

/// `cards`: the number of its cards with a control socket.
fn check_guest(guest: &QemuFacts, command_line: &str, cards: usize, leaks_output: bool) -> Result<(), Error> {
    check(guest, dirty_log(guest, command_line))?;
    if guest.status != "running" {
        return Err(Error::NotRunning { status: guest.status.clone() });
    }
    if let Some(reason) = guest.blocked_reasons.first() {
        return Err(Error::Blocked { reason: reason.clone() });
    }
    let networks = guest.netdevs.iter().flatten();
    let (ours, others): (Vec<_>, Vec<_>) = networks.partition(|network| network.kind == "vhost-user");
    let without = others.first().or_else(|| ours.get(cards));
    match without {
        Some(network) if !leaks_output => {
            Err(Error::OutputNotHeld { id: network.id.clone(), kind: network.kind.clone() })
        }
        _ => Ok(()),
    }
}

/// Tracker of the guest's writes, by its command line: a query that tells would change a capability.
fn dirty_log(guest: &QemuFacts, command_line: &str) -> DirtyLog {
    match guest.kvm {
        Some(true) if command_line.contains("dirty-ring-size") => DirtyLog::KvmRing,
        Some(true) => DirtyLog::KvmBitmap,
        _ => DirtyLog::Emulation,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_of_writes_is_that_of_the_guests_own_command_line() {
        let kvm = |kvm| QemuFacts { kvm: Some(kvm), ..QemuFacts::default() };
        let ring = "-accel kvm,dirty-ring-size=4096";
        assert_eq!(dirty_log(&kvm(true), ring), DirtyLog::KvmRing);
        assert_eq!(dirty_log(&kvm(true), "-accel kvm"), DirtyLog::KvmBitmap);
        assert_eq!(dirty_log(&kvm(false), ""), DirtyLog::Emulation);
    }
}
