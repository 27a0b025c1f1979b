//! Guests that cannot be protected, refused before anything is changed.

use towline_compat::checkpoints::{DirtyLog, check};
use towline_compat::facts::QemuFacts;

use super::request::Error;
use crate::remote::DepartingGuest;

/// Refuses a guest that would be lost, or whose output would not be held.
pub(crate) fn check_departing(guest: &DepartingGuest, leaks_output: bool) -> Result<(), Error> {
    let Some(facts) = guest.qemu() else { return Ok(()) };
    let line = guest.new_guest().map(|guest| &*guest.command_line).unwrap_or_default();
    check(facts, dirty_log(facts, line))?;
    if facts.status != "running" {
        return Err(Error::NotRunning { status: facts.status.clone() });
    }
    if let Some(reason) = facts.blocked_reasons.first() {
        return Err(Error::Blocked { reason: reason.clone() });
    }
    let networks = facts.netdevs.iter().flatten();
    let (ours, others): (Vec<_>, Vec<_>) = networks.partition(|network| network.kind == "vhost-user");
    // As many cards of towline as have a control socket.
    let without = others.first().or_else(|| ours.get(guest.card_controls().len()));
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
