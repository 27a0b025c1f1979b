//! Sizes in findings.

const MIB: u64 = 1 << 20;

/// Formats a size for people, with the exact number of bytes: `512 MiB (536870912 bytes)`.
pub(crate) fn size_text(bytes: u64) -> String {
    if bytes < MIB {
        return format!("{bytes} bytes");
    }
    let mib = match bytes % MIB {
        0 => format!("{}", bytes / MIB),
        _ => format!("{:.2}", bytes as f64 / MIB as f64),
    };
    format!("{mib} MiB ({bytes} bytes)")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_in_mib_and_in_bytes() {
        assert_eq!(size_text(512 << 20), "512 MiB (536870912 bytes)");
        assert_eq!(size_text((1 << 20) + (1 << 19)), "1.50 MiB (1572864 bytes)");
        assert_eq!(size_text(4096), "4096 bytes");
    }
}
