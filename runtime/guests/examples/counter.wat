(module
 (type $0 (func (param i32 i32 i32 i32) (result i32)))
 (type $1 (func (result i32)))
 (import "agent" "host_call" (func $fimport$0 (type $0) (param i32 i32 i32 i32) (result i32)))
 (global $global$0 (mut i32) (i32.const 65536))
 (memory $0 2)
 (data $0 (i32.const 65536) "{\"v\":1,\"op\":\"log\",\"args\":{\"level\":\"info\",\"message\":\"counting\",\"fields\":{}}}\00\00\00\00\00{\"v\":1,\"op\":\"memory.put\",\"args\":{\"key\":\"count\",\"value\":41}}\00\00\00\00\00{\"v\":1,\"op\":\"memory.get\",\"args\":{\"key\":\"count\"}}\00\00\00\00\00\00\00\00\00\00\00\00\00\00\00\00{\"v\":1,\"op\":\"sleep\",\"args\":{\"ms\":20}}\00")
 (table $0 1 1 funcref)
 (export "memory" (memory $0))
 (export "run" (func $0))
 (func $0 (type $1) (result i32)
  (local $0 i32)
  (local $1 i32)
  (local $2 i32)
  (local $3 i32)
  (local $4 i32)
  (drop
   (call $fimport$0
    (i32.const 65536)
    (i32.const 75)
    (i32.const 65792)
    (i32.const 4096)
   )
  )
  (drop
   (call $fimport$0
    (i32.const 65616)
    (i32.const 59)
    (i32.const 65792)
    (i32.const 4096)
   )
  )
  (drop
   (call $fimport$0
    (i32.const 65744)
    (i32.const 37)
    (i32.const 65792)
    (i32.const 4096)
   )
  )
  (block $label$1
   (block $label$2
    (br_if $label$2
     (i32.ge_s
      (local.tee $0
       (call $fimport$0
        (i32.const 65680)
        (i32.const 48)
        (i32.const 65792)
        (i32.const 4096)
       )
      )
      (i32.const 1)
     )
    )
    (local.set $1
     (i32.const 0)
    )
    (br $label$1)
   )
   (local.set $2
    (i32.and
     (local.get $0)
     (i32.const 3)
    )
   )
   (local.set $3
    (i32.const 0)
   )
   (local.set $1
    (i32.const 0)
   )
   (block $label$3
    (br_if $label$3
     (i32.lt_u
      (local.get $0)
      (i32.const 4)
     )
    )
    (local.set $4
     (i32.and
      (local.get $0)
      (i32.const 2147483644)
     )
    )
    (local.set $3
     (i32.const 0)
    )
    (local.set $1
     (i32.const 0)
    )
    (loop $label$4
     (local.set $1
      (i32.add
       (i32.mul
        (i32.add
         (i32.mul
          (i32.add
           (i32.mul
            (i32.add
             (i32.mul
              (local.get $1)
              (i32.const 31)
             )
             (i32.load8_s
              (i32.add
               (local.get $3)
               (i32.const 65792)
              )
             )
            )
            (i32.const 31)
           )
           (i32.load8_s
            (i32.add
             (local.get $3)
             (i32.const 65793)
            )
           )
          )
          (i32.const 31)
         )
         (i32.load8_s
          (i32.add
           (local.get $3)
           (i32.const 65794)
          )
         )
        )
        (i32.const 31)
       )
       (i32.load8_s
        (i32.add
         (local.get $3)
         (i32.const 65795)
        )
       )
      )
     )
     (br_if $label$4
      (i32.ne
       (local.get $4)
       (local.tee $3
        (i32.add
         (local.get $3)
         (i32.const 4)
        )
       )
      )
     )
    )
    (br_if $label$1
     (i32.eqz
      (local.get $2)
     )
    )
   )
   (local.set $3
    (i32.add
     (local.get $3)
     (i32.const 65792)
    )
   )
   (loop $label$5
    (local.set $1
     (i32.add
      (i32.mul
       (local.get $1)
       (i32.const 31)
      )
      (i32.load8_s
       (local.get $3)
      )
     )
    )
    (local.set $3
     (i32.add
      (local.get $3)
      (i32.const 1)
     )
    )
    (br_if $label$5
     (local.tee $2
      (i32.add
       (local.get $2)
       (i32.const -1)
      )
     )
    )
   )
  )
  (select
   (local.get $1)
   (i32.const -1)
   (i32.lt_u
    (i32.add
     (local.get $0)
     (i32.const -1)
    )
    (i32.const 4095)
   )
  )
 )
)
