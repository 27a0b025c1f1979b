//! Landlock: files below permitted paths, and TCP ports.

use std::path::PathBuf;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, NetPort, RestrictSelfAttr as _, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope, path_beneath_rules,
};

use super::policy::{AllowedPorts, Policy, parent_directory};

/// Linux 6.12: files, devices, TCP ports, signals and abstract sockets. An older kernel enforces the part
/// that it supports.
const VERSION: ABI = ABI::V6;

/// Restricts the calling thread and those that it starts, from Linux 7.0 on all threads. The error describes
/// what the kernel lacks.
pub(super) fn apply(policy: &Policy) -> Result<(), String> {
    let failed = |error: RulesetError| format!("landlock: {error}; files and ports are not restricted");
    let threads = std::fs::read_dir("/proc/self/task").map_or(1, Iterator::count);
    let ruleset = ruleset(policy).and_then(|ruleset| ruleset.all_threads(true)).map_err(failed)?;
    let status = ruleset.restrict_self().map_err(failed)?;
    match status.ruleset {
        _ if threads > 1 && !status.all_threads => Err(format!(
            "landlock: {} threads were started before it and are not restricted; please report this bug",
            threads - 1
        )),
        RulesetStatus::FullyEnforced => Ok(()),
        RulesetStatus::PartiallyEnforced => {
            tracing::info!("this kernel supports a part of landlock's rules, which it enforces");
            Ok(())
        }
        RulesetStatus::NotEnforced => {
            Err("this kernel has no landlock: files and ports are restricted only by the user's permissions; it needs Linux 5.13, \
             CONFIG_SECURITY_LANDLOCK and `landlock` in lsm="
                .into())
        }
    }
}

fn ruleset(policy: &Policy) -> Result<RulesetCreated, RulesetError> {
    let mut ruleset =
        Ruleset::default().handle_access(AccessFs::from_all(VERSION))?.scope(Scope::from_all(VERSION))?;
    for (ports, access) in [(&policy.bind, AccessNet::BindTcp), (&policy.connect, AccessNet::ConnectTcp)] {
        if *ports != AllowedPorts::Any {
            ruleset = ruleset.handle_access(access)?;
        }
    }
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let write = AccessFs::from_all(VERSION)
        & !(AccessFs::Execute | AccessFs::MakeChar | AccessFs::MakeBlock | AccessFs::IoctlDev);
    let mut ruleset = ruleset.create()?;
    // The directory is opened for its lock, and a stale socket is replaced.
    let listen = AccessFs::MakeSock | AccessFs::RemoveFile | AccessFs::ReadDir;
    let [remove, listening]: [Vec<PathBuf>; 2] = [&policy.remove, &policy.listen]
        .map(|paths| paths.iter().map(|path| parent_directory(path)).collect());
    let paths: [(&[PathBuf], BitFlags<AccessFs>); 4] = [
        (&policy.read, read),
        (&policy.write, write),
        (&remove, AccessFs::RemoveFile.into()),
        (&listening, listen),
    ];
    for (paths, access) in paths {
        // A missing path is left out: opening it fails later with a better error.
        ruleset = ruleset.add_rules(path_beneath_rules(paths, access))?;
    }
    for (ports, access) in [(&policy.bind, AccessNet::BindTcp), (&policy.connect, AccessNet::ConnectTcp)] {
        if let AllowedPorts::Only(ports) = ports {
            ruleset = ruleset
                .add_rules(ports.iter().map(|port| Ok::<_, RulesetError>(NetPort::new(*port, access))))?;
        }
    }
    Ok(ruleset)
}
