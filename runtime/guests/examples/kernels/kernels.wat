(module
 (type $0 (func (param i32) (result i64)))
 (type $1 (func (param i32)))
 (type $2 (func (param i32 i32) (result i64)))
 (type $3 (func))
 (type $4 (func (param i32 i64) (result i64)))
 (global $global$0 (mut i32) (i32.const 65536))
 (memory $0 2)
 (table $0 5 5 funcref)
 (elem $0 (i32.const 1) $8 $9 $10 $11)
 (export "memory" (memory $0))
 (export "run" (func $0))
 (func $0 (type $2) (param $0 i32) (param $1 i32) (result i64)
  (local $2 i64)
  (local.set $2
   (i64.const 0)
  )
  (block $label$1
   (block $label$2
    (block $label$3
     (block $label$4
      (block $label$5
       (block $label$6
        (block $label$7
         (br_table $label$2 $label$7 $label$6 $label$5 $label$4 $label$3 $label$1
          (local.get $0)
         )
        )
        (return
         (call $1
          (local.get $1)
         )
        )
       )
       (return
        (call $2
         (local.get $1)
        )
       )
      )
      (return
       (call $3
        (local.get $1)
       )
      )
     )
     (return
      (call $4
       (local.get $1)
      )
     )
    )
    (call $5)
    (unreachable)
   )
   (local.set $2
    (call $6
     (local.get $1)
    )
   )
  )
  (local.get $2)
 )
 (func $1 (type $0) (param $0 i32) (result i64)
  (local $1 f64)
  (local $2 f64)
  (local $3 i32)
  (local $4 f64)
  (local $5 i32)
  (local $6 f64)
  (local $7 f64)
  (block $label$1
   (br_if $label$1
    (local.get $0)
   )
   (return
    (i64.const 0)
   )
  )
  (local.set $1
   (f64.const 0.7)
  )
  (local.set $2
   (f64.const 0)
  )
  (local.set $3
   (i32.const 0)
  )
  (local.set $4
   (f64.const 0.3)
  )
  (loop $label$2
   (local.set $5
    (i32.const 100)
   )
   (loop $label$3
    (local.set $2
     (f64.add
      (f64.mul
       (local.tee $4
        (f64.mul
         (f64.mul
          (local.tee $6
           (f64.mul
            (f64.mul
             (local.get $4)
             (f64.const 3.99)
            )
            (f64.sub
             (f64.const 1)
             (local.get $4)
            )
           )
          )
          (f64.const 3.99)
         )
         (f64.sub
          (f64.const 1)
          (local.get $6)
         )
        )
       )
       (local.tee $1
        (f64.add
         (f64.mul
          (local.tee $7
           (f64.add
            (f64.mul
             (local.get $1)
             (f64.const 0.9)
            )
            (f64.div
             (local.get $6)
             (f64.add
              (local.get $1)
              (f64.const 1.5)
             )
            )
           )
          )
          (f64.const 0.9)
         )
         (f64.div
          (local.get $4)
          (f64.add
           (local.get $7)
           (f64.const 1.5)
          )
         )
        )
       )
      )
      (f64.add
       (f64.mul
        (local.get $6)
        (local.get $7)
       )
       (local.get $2)
      )
     )
    )
    (br_if $label$3
     (local.tee $5
      (i32.add
       (local.get $5)
       (i32.const -2)
      )
     )
    )
   )
   (br_if $label$2
    (i32.ne
     (local.tee $3
      (i32.add
       (local.get $3)
       (i32.const 1)
      )
     )
     (local.get $0)
    )
   )
  )
  (i64.reinterpret_f64
   (local.get $2)
  )
 )
 (func $2 (type $0) (param $0 i32) (result i64)
  (local $1 i64)
  (local.set $1
   (i64.const 0)
  )
  (block $label$1
   (br_if $label$1
    (i32.lt_u
     (local.get $0)
     (i32.const 2)
    )
   )
   (local.set $1
    (i64.const 0)
   )
   (loop $label$2
    (local.set $1
     (i64.add
      (call $2
       (i32.add
        (local.get $0)
        (i32.const -1)
       )
      )
      (local.get $1)
     )
    )
    (br_if $label$2
     (i32.ge_u
      (local.tee $0
       (i32.add
        (local.get $0)
        (i32.const -2)
       )
      )
      (i32.const 2)
     )
    )
   )
  )
  (i64.add
   (local.get $1)
   (i64.extend_i32_u
    (local.get $0)
   )
  )
 )
 (func $3 (type $0) (param $0 i32) (result i64)
  (local $1 i64)
  (local $2 i64)
  (local $3 i64)
  (block $label$1
   (block $label$2
    (br_if $label$2
     (local.get $0)
    )
    (local.set $1
     (i64.const 1)
    )
    (br $label$1)
   )
   (local.set $2
    (i64.extend_i32_u
     (local.get $0)
    )
   )
   (local.set $3
    (i64.const 0)
   )
   (local.set $1
    (i64.const 1)
   )
   (loop $label$3
    (local.set $1
     (i64.xor
      (call $7
       (i32.const 300)
       (i64.add
        (local.get $1)
        (local.get $3)
       )
      )
      (local.get $1)
     )
    )
    (br_if $label$3
     (i64.ne
      (local.get $2)
      (local.tee $3
       (i64.add
        (local.get $3)
        (i64.const 1)
       )
      )
     )
    )
   )
  )
  (local.get $1)
 )
 (func $4 (type $0) (param $0 i32) (result i64)
  (local $1 i32)
  (local $2 i32)
  (local $3 i64)
  (global.set $global$0
   (local.tee $1
    (i32.sub
     (global.get $global$0)
     (i32.const 32)
    )
   )
  )
  (local.set $2
   (i32.const 0)
  )
  (i32.store offset=98332
   (i32.const 0)
   (i32.const 1)
  )
  (i32.store offset=98328
   (i32.const 0)
   (i32.const 2)
  )
  (i32.store offset=98324
   (i32.const 0)
   (i32.const 3)
  )
  (i32.store offset=98320
   (i32.const 0)
   (i32.const 4)
  )
  (i32.store offset=98316
   (i32.const 0)
   (i32.const 1)
  )
  (i32.store offset=98312
   (i32.const 0)
   (i32.const 2)
  )
  (i32.store offset=98308
   (i32.const 0)
   (i32.const 3)
  )
  (i32.store offset=98304
   (i32.const 0)
   (i32.const 4)
  )
  (i32.store offset=28
   (local.get $1)
   (i32.add
    (local.tee $0
     (i32.mul
      (local.get $0)
      (i32.const 1000)
     )
    )
    (i32.const -1)
   )
  )
  (i32.store offset=24
   (local.get $1)
   (i32.const 0)
  )
  (i64.store offset=16
   (local.get $1)
   (i64.const 2)
  )
  (i64.store offset=8
   (local.get $1)
   (i64.const 1)
  )
  (block $label$1
   (block $label$2
    (br_if $label$2
     (local.get $0)
    )
    (local.set $3
     (i64.const 3)
    )
    (br $label$1)
   )
   (loop $label$3
    (call_indirect $0 (type $1)
     (i32.add
      (local.get $1)
      (i32.const 8)
     )
     (i32.load offset=98304
      (i32.shl
       (i32.and
        (local.get $2)
        (i32.const 7)
       )
       (i32.const 2)
      )
     )
    )
    (i32.store offset=24
     (local.get $1)
     (local.tee $2
      (i32.add
       (i32.load offset=24
        (local.get $1)
       )
       (i32.const 1)
      )
     )
    )
    (i32.store offset=28
     (local.get $1)
     (i32.add
      (local.tee $0
       (i32.load offset=28
        (local.get $1)
       )
      )
      (i32.const -1)
     )
    )
    (br_if $label$3
     (local.get $0)
    )
   )
   (local.set $3
    (i64.xor
     (i64.load offset=16
      (local.get $1)
     )
     (i64.load offset=8
      (local.get $1)
     )
    )
   )
  )
  (global.set $global$0
   (i32.add
    (local.get $1)
    (i32.const 32)
   )
  )
  (local.get $3)
 )
 (func $5 (type $3)
  (local $0 i32)
  (local $1 i32)
  (i32.store offset=12
   (local.tee $0
    (i32.sub
     (global.get $global$0)
     (i32.const 16)
    )
   )
   (i32.const 0)
  )
  (loop $label$1
   (i32.store8 offset=65536
    (local.tee $1
     (i32.and
      (i32.load offset=12
       (local.get $0)
      )
      (i32.const 255)
     )
    )
    (i32.add
     (i32.load8_u offset=65536
      (local.get $1)
     )
     (i32.const 1)
    )
   )
   (i32.store offset=12
    (local.get $0)
    (i32.add
     (i32.load offset=12
      (local.get $0)
     )
     (i32.const 1)
    )
   )
   (br $label$1)
  )
 )
 (func $6 (type $0) (param $0 i32) (result i64)
  (local $1 i32)
  (local $2 i32)
  (local $3 i64)
  (local $4 i32)
  (local.set $1
   (i32.const 3)
  )
  (loop $label$1
   (i32.store8
    (i32.add
     (local.get $1)
     (i32.const 65536)
    )
    (i32.add
     (local.tee $2
      (i32.mul
       (local.get $1)
       (i32.const 7)
      )
     )
     (i32.const 3)
    )
   )
   (i32.store8
    (i32.add
     (local.get $1)
     (i32.const 65535)
    )
    (i32.add
     (local.get $2)
     (i32.const -4)
    )
   )
   (i32.store8
    (i32.add
     (local.get $1)
     (i32.const 65534)
    )
    (i32.add
     (local.get $2)
     (i32.const -11)
    )
   )
   (i32.store8
    (i32.add
     (local.get $1)
     (i32.const 65533)
    )
    (i32.add
     (local.get $2)
     (i32.const -18)
    )
   )
   (br_if $label$1
    (i32.ne
     (local.tee $1
      (i32.add
       (local.get $1)
       (i32.const 4)
      )
     )
     (i32.const 32771)
    )
   )
  )
  (local.set $3
   (i64.const -3750763034362895579)
  )
  (block $label$2
   (br_if $label$2
    (i32.eqz
     (local.get $0)
    )
   )
   (local.set $4
    (i32.const 0)
   )
   (loop $label$3
    (local.set $1
     (i32.const -32768)
    )
    (loop $label$4
     (i64.store8
      (local.tee $2
       (i32.add
        (local.get $1)
        (i32.const 98304)
       )
      )
      (i64.shr_u
       (local.tee $3
        (i64.mul
         (i64.xor
          (local.get $3)
          (i64.load8_u
           (local.get $2)
          )
         )
         (i64.const 1099511628211)
        )
       )
       (i64.const 29)
      )
     )
     (i64.store8
      (local.tee $2
       (i32.add
        (local.get $1)
        (i32.const 98305)
       )
      )
      (i64.shr_u
       (local.tee $3
        (i64.mul
         (i64.xor
          (local.get $3)
          (i64.load8_u
           (local.get $2)
          )
         )
         (i64.const 1099511628211)
        )
       )
       (i64.const 29)
      )
     )
     (br_if $label$4
      (local.tee $1
       (i32.add
        (local.get $1)
        (i32.const 2)
       )
      )
     )
    )
    (br_if $label$3
     (i32.ne
      (local.tee $4
       (i32.add
        (local.get $4)
        (i32.const 1)
       )
      )
      (local.get $0)
     )
    )
   )
  )
  (local.get $3)
 )
 (func $7 (type $4) (param $0 i32) (param $1 i64) (result i64)
  (local $2 i32)
  (local $3 i64)
  (local $4 i64)
  (local $5 i64)
  (local $6 i32)
  (local $7 i64)
  (local $8 i32)
  (local $9 i64)
  (global.set $global$0
   (local.tee $2
    (i32.sub
     (global.get $global$0)
     (i32.const 32)
    )
   )
  )
  (i64.store
   (local.get $2)
   (local.get $1)
  )
  (i64.store offset=8
   (local.get $2)
   (i64.xor
    (local.get $1)
    (local.tee $3
     (i64.extend_i32_u
      (local.get $0)
     )
    )
   )
  )
  (i64.store offset=16
   (local.get $2)
   (i64.add
    (local.get $1)
    (local.get $3)
   )
  )
  (i64.store offset=24
   (local.get $2)
   (i64.mul
    (local.get $1)
    (i64.const 31)
   )
  )
  (local.set $4
   (i64.shl
    (local.get $1)
    (i64.const 1)
   )
  )
  (local.set $3
   (i64.const 0)
  )
  (local.set $5
   (i64.const 40)
  )
  (local.set $6
   (i32.const 1)
  )
  (local.set $7
   (i64.const 0)
  )
  (loop $label$1
   (i64.store
    (local.tee $8
     (i32.add
      (local.get $2)
      (i32.shl
       (i32.and
        (i32.add
         (local.get $6)
         (i32.const -1)
        )
        (i32.const 2)
       )
       (i32.const 3)
      )
     )
    )
    (i64.add
     (local.get $3)
     (i64.load
      (local.get $8)
     )
    )
   )
   (local.set $9
    (i64.load
     (local.tee $8
      (i32.add
       (local.get $2)
       (i32.shl
        (i32.and
         (local.get $6)
         (i32.const 3)
        )
        (i32.const 3)
       )
      )
     )
    )
   )
   (i64.store
    (local.get $8)
    (i64.add
     (i64.add
      (local.get $1)
      (local.get $3)
     )
     (i64.load
      (local.get $8)
     )
    )
   )
   (local.set $7
    (i64.add
     (i64.load
      (i32.add
       (local.get $2)
       (i32.shl
        (i32.and
         (i32.add
          (local.get $6)
          (i32.const 1)
         )
         (i32.const 2)
        )
        (i32.const 3)
       )
      )
     )
     (i64.add
      (local.get $9)
      (local.get $7)
     )
    )
   )
   (local.set $3
    (i64.add
     (local.get $3)
     (local.get $4)
    )
   )
   (local.set $6
    (i32.add
     (local.get $6)
     (i32.const 2)
    )
   )
   (br_if $label$1
    (i32.eqz
     (i64.eqz
      (local.tee $5
       (i64.add
        (local.get $5)
        (i64.const -2)
       )
      )
     )
    )
   )
  )
  (block $label$2
   (br_if $label$2
    (i32.eqz
     (local.get $0)
    )
   )
   (local.set $7
    (i64.add
     (i64.add
      (i64.mul
       (call $7
        (i32.add
         (local.get $0)
         (i32.const -1)
        )
        (i64.or
         (local.get $7)
         (i64.const 1)
        )
       )
       (i64.const 3)
      )
      (i64.load
       (local.get $2)
      )
     )
     (i64.load offset=24
      (local.get $2)
     )
    )
   )
  )
  (global.set $global$0
   (i32.add
    (local.get $2)
    (i32.const 32)
   )
  )
  (local.get $7)
 )
 (func $8 (type $1) (param $0 i32)
  (i64.store
   (local.get $0)
   (i64.add
    (i64.xor
     (i64.load offset=8
      (local.get $0)
     )
     (i64.load32_u offset=16
      (local.get $0)
     )
    )
    (i64.load
     (local.get $0)
    )
   )
  )
 )
 (func $9 (type $1) (param $0 i32)
  (local $1 i64)
  (i64.store
   (local.get $0)
   (i64.add
    (i64.shr_u
     (local.tee $1
      (i64.load offset=8
       (local.get $0)
      )
     )
     (i64.const 4)
    )
    (i64.mul
     (i64.add
      (i64.shr_u
       (local.get $1)
       (i64.const 3)
      )
      (i64.mul
       (i64.add
        (i64.shr_u
         (local.get $1)
         (i64.const 2)
        )
        (i64.mul
         (i64.add
          (i64.shr_u
           (local.get $1)
           (i64.const 1)
          )
          (i64.mul
           (i64.add
            (local.get $1)
            (i64.mul
             (i64.load
              (local.get $0)
             )
             (i64.const -7046029254386353131)
            )
           )
           (i64.const -7046029254386353131)
          )
         )
         (i64.const -7046029254386353131)
        )
       )
       (i64.const -7046029254386353131)
      )
     )
     (i64.const -7046029254386353131)
    )
   )
  )
 )
 (func $10 (type $1) (param $0 i32)
  (i32.store offset=16
   (local.get $0)
   (i32.add
    (i32.and
     (i32.load
      (local.get $0)
     )
     (i32.const 3)
    )
    (i32.load offset=16
     (local.get $0)
    )
   )
  )
 )
 (func $11 (type $1) (param $0 i32)
  (i64.store offset=8
   (local.get $0)
   (i64.add
    (i64.rotl
     (i64.load offset=8
      (local.get $0)
     )
     (i64.const 7)
    )
    (i64.load
     (local.get $0)
    )
   )
  )
 )
)
